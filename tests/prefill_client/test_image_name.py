"""Names of images: what they cover, which identifiers are accepted, and what a request carries beside them."""

import json
import re
from dataclasses import replace

import pytest

from encoder_contract.geometry import Grid
from encoder_contract.video import Frames
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo

GRID = Grid(1, 4, 6)
NAME = ImageName(bytes(range(32)), GRID, bytes(16))
PAIR = replace(NAME, frames=Frames(0, 0, GRID))
CHANGES = [
    {"digest": bytes(32)},
    {"grid": Grid(1, 6, 4)},
    {"producer": b"x" * 16},
    {"frames": Frames(0, 3, GRID)},
    {"frames": Frames(1, 3, GRID)},
]
OURS, OTHERS = NameSigner(bytes(32)), NameSigner(bytes(31) + b"x")


def test_an_identifier_depends_on_every_property_of_the_image_and_on_the_key() -> None:
    names = [NAME, PAIR, *(replace(NAME, **change) for change in CHANGES)]
    identifiers = {signer.identifier(name) for signer in (OURS, OTHERS) for name in names}
    assert len(identifiers) == 2 * len(names)
    assert {signer.identifier(name) for signer in (OURS, OTHERS) for name in names} == identifiers
    # Routers and stores of KV blocks read an identifier as vLLM's own hash.
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in identifiers)
    assert all(int(OURS.sealed(name), 16) for name in names)


@pytest.mark.parametrize("name", [NAME, PAIR, replace(NAME, frames=Frames(2, 7, GRID))])
def test_a_name_is_read_only_by_whoever_has_the_key_of_its_identifier(name: ImageName) -> None:
    identifier, sealed = OURS.identifier(name), OURS.sealed(name)
    assert ImageName.from_hex(name.hex()) == name
    assert OURS.name(identifier, OURS.names([NAME.hex(), name.hex()])) == name
    assert OURS.name(sealed, {}) == name
    others = [name.hex()[:-1] + "e", OTHERS.sealed(name), identifier, "", "x", "\ud800" * 112]
    assert OURS.name(identifier, OURS.names(others)) is None
    assert OTHERS.name(identifier, OTHERS.names([name.hex()])) is None
    for foreign in (OTHERS.sealed(name), sealed.upper(), f" {sealed}", sealed[:-1] + "7"):
        assert OURS.name(foreign, {}) is None


@pytest.mark.attack("pixels under the identifier of another image")
def test_an_identifier_shows_that_it_is_one() -> None:
    for name in (NAME, PAIR):
        identifier = OURS.identifier(name)
        assert OURS.is_identifier(identifier)
        assert OURS.is_identifier(OURS.sealed(name))
        assert OURS.is_identifier(OTHERS.sealed(name)), "it has the form, and must not reach a tower"
        own_hash = "5e" * 32
        swapped = identifier[32:] + identifier[:32]
        others = (OTHERS.identifier(name), own_hash, swapped, identifier.upper(), f"{identifier} ", "")
        assert not any(map(OURS.is_identifier, (*others, identifier[1:], "é" * 64, "\ud800" * 64)))


def test_a_request_carries_names_and_reads_nothing_else_from_callers() -> None:
    body = json.loads(json.dumps({"ec_transfer_params": {"another": 1}}))
    info = RequestInfo("id", images=(NAME.hex(), PAIR.hex()), stored=(1,))
    info.write(body)
    sent = json.loads(json.dumps(body))["ec_transfer_params"]
    assert RequestInfo.read(sent, "other") == info
    assert sent["another"] == 1
    for value in (None, "x", 3, {"x": 1}, [[1], {"y": 2}, 7]):
        assert RequestInfo.read({RequestInfo.KEY: {"images": value}}, "id").images == ()
