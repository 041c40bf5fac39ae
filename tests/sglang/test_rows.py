"""The rows of a chunk, fetched from a real server as the forward of a model fetches them; no engine runs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.runtime_context import get_parallel

from encoder_contract.checkpoint import model_fingerprint
from prefill_client import BlockingClient, RowRequest
from prefill_client.sglang import rows as chunk_rows
from prefill_client.sglang.image_name import KEY, SglangImageName, file_as_feature
from prefill_client.sglang.rows import ChunkRows
from prefill_client.sglang.sglang_settings import SglangSettings
from testing.photos import photo
from tests.sglang.conftest import checkpoint_of, service_of
from tests.vllm.restartable import Restartable

LIKE = torch.empty(0)
FILES = [photo(200, 150, seed) for seed in range(70, 73)]
Wanted = tuple[SglangImageName, MultimodalDataItem]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Say that there is no other rank."""
    with get_parallel().override(attn_tp_rank=0):
        yield


@pytest.fixture
def service(checkpoint: Path) -> Iterator[Restartable]:
    """A server of this test's own."""
    with service_of(checkpoint) as service:
        yield service


def encoded(service: Restartable) -> tuple[list[Wanted], list[torch.Tensor]]:
    """Let the service encode the files as a request does; return what goes to the scheduler, and the rows."""
    with BlockingClient.connect(service.endpoint) as client:
        answers = client.submit(FILES)
        with client.fetch([RowRequest(answer.digest) for answer in answers]) as outcomes:
            found = {outcome.index: outcome.tensor() for outcome in outcomes}
    names = [SglangImageName.of_answer(answer) for answer in answers]
    return [(name, item_of(name, file)) for name, file in zip(names, FILES, strict=True)], [
        found[index] for index in range(len(FILES))
    ]


def item_of(name: SglangImageName, file: bytes) -> MultimodalDataItem:
    return MultimodalDataItem(
        modality=Modality.IMAGE, feature=file_as_feature(file), model_specific_data=name.as_data()
    )


@pytest.mark.story("rows arrive to the bit")
def test_rows_arrive_to_the_bit(service: Restartable) -> None:
    wanted, right = encoded(service)
    found = ChunkRows(SglangSettings(endpoints=(service.endpoint,))).fetch(wanted, LIKE)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, right, strict=True))


@pytest.mark.story("rows are lost before the prefill")
def test_images_that_the_service_has_lost_are_sent_again(service: Restartable) -> None:
    wanted, right = encoded(service)
    rows = ChunkRows(SglangSettings(endpoints=(service.endpoint,), fetch_timeout_s=60.0))
    service.kill()
    service.start()
    found = rows.fetch(wanted, LIKE)
    assert service.encodes() == len(FILES)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, right, strict=True))


def test_rows_under_another_address_are_not_used(service: Restartable) -> None:
    wanted, right = encoded(service)
    (name, item), *others = wanted
    found = ChunkRows(SglangSettings(endpoints=(service.endpoint,))).fetch(
        [(replace(name, address=bytes(32)), item), *others], LIKE
    )
    assert found[0] is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[1:], right[1:], strict=True))


def test_a_service_that_does_not_answer_is_asked_again_after_a_pause(
    service: Restartable, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, right = encoded(service)
    rows = ChunkRows(SglangSettings(endpoints=(service.endpoint,)))
    now_s = monotonic()
    monkeypatch.setattr(chunk_rows, "monotonic", lambda: now_s)
    service.kill()
    assert rows.fetch(wanted, LIKE) == [None] * len(FILES)
    service.start()
    encoded(service)
    assert rows.fetch(wanted, LIKE) == [None] * len(FILES), "within the pause"
    now_s += chunk_rows.PAUSE_S
    found = rows.fetch(wanted, LIKE)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, right, strict=True))


def test_a_service_of_other_weights_is_soon_asked_again(
    service: Restartable, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that has updated the engine updates the service next."""
    wanted, right = encoded(service)
    before = Restartable(checkpoint_of("qwen3_vl", tmp_path / "before", seed=3))
    before.endpoint = service.endpoint
    rows = ChunkRows(SglangSettings(endpoints=(service.endpoint,)))
    fetch = partial(rows.fetch, wanted, LIKE, model_fingerprint(checkpoint))
    now_s = monotonic()
    monkeypatch.setattr(chunk_rows, "monotonic", lambda: now_s)
    service.kill()
    before.start()
    assert fetch() == [None] * len(FILES)
    before.kill()
    service.start()
    encoded(service)
    assert fetch() == [None] * len(FILES), "within the pause"
    now_s += chunk_rows.OTHER_WEIGHTS_PAUSE_S
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fetch(), right, strict=True))


def test_an_item_from_another_processor_has_no_name(service: Restartable) -> None:
    (name, item), *_ = encoded(service)[0]
    assert SglangImageName.of_item(item) == name
    pixels = MultimodalDataItem(
        modality=Modality.IMAGE, feature=torch.zeros(4, 1536), model_specific_data=name.as_data()
    )
    assert SglangImageName.of_item(pixels) is None, "callers may send pixels with any data"
    for forged in (None, "x", [], ["00", "zz", "", [1, 2, 2], 1], [1, 2, 3, 4, 5]):
        item.model_specific_data[KEY] = forged
        assert SglangImageName.of_item(item) is None
