"""Names of images: what they cover, which proofs the connector accepts, and what a request carries beside them."""

import json
from dataclasses import replace

import pytest

from encoder_contract.geometry import Grid
from encoder_contract.video import Frames
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo, identifier_of

NAME = ImageName(bytes(range(32)), Grid(1, 4, 6), bytes(16))
OURS, OTHERS = NameSigner(bytes(32)), NameSigner(bytes(31) + b"x")


def test_a_name_depends_on_every_property_of_the_image_and_on_no_key() -> None:
    changes = [
        {"digest": bytes(32)},
        {"grid": Grid(1, 6, 4)},
        {"producer": b"x" * 16},
        {"frames": Frames(0, 3, Grid(1, 4, 6))},
        {"frames": Frames(1, 3, Grid(1, 4, 6))},
    ]
    identifiers = {identifier_of(NAME), *(identifier_of(replace(NAME, **change)) for change in changes)}
    assert len(identifiers) == 1 + len(changes)
    # Engines of any process and host have this name: it is part of the hashes of shared KV blocks.
    assert identifier_of(NAME) == f"encsvc1-{bytes(range(32)).hex()}-4x6-{'0' * 32}"


@pytest.mark.parametrize("frames", [None, Frames(2, 7, Grid(1, 4, 6))])
def test_a_name_is_read_only_with_a_proof_of_the_same_key(frames: Frames | None) -> None:
    name = replace(NAME, frames=frames)
    identifier = identifier_of(name)
    assert OURS.name(identifier, {OURS.proof(identifier), "x"}) == name
    assert OURS.name(OURS.sealed(identifier)) == name
    proofs = {
        "",
        "0" * 32,
        OTHERS.proof(identifier),
        OURS.proof(identifier + "0"),
        OURS.proof(identifier).upper(),
    }
    assert OURS.name(identifier) is None
    assert OURS.name(identifier, proofs) is None
    assert OURS.name(OTHERS.sealed(identifier), {OURS.proof(identifier)}) is None, (
        "a wrong proof inside counts"
    )
    assert OURS.name(identifier.upper(), {OURS.proof(identifier.upper())}) is None
    assert OURS.name(f"{identifier}\n", {OURS.proof(identifier)}) is None


def test_a_request_carries_proofs_and_reads_nothing_else_from_callers() -> None:
    body = json.loads(json.dumps({"ec_transfer_params": {"another": 1}}))
    info = RequestInfo("id", proofs=(OURS.proof("a"), OURS.proof("b")), stored=(1,))
    info.write(body)
    sent = json.loads(json.dumps(body))["ec_transfer_params"]
    assert RequestInfo.read(sent, "other") == info
    assert sent["another"] == 1
    for value in (None, "x", 3, {"x": 1}, [[1], {"y": 2}]):
        read = RequestInfo.read({RequestInfo.KEY: {"proofs": value}}, "id")
        assert all(isinstance(each, str) for each in read.proofs)
