"""Neither hostile callers nor store failures end an engine that shares, or give other engines wrong rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prefill_client.vllm import shared_store
from prefill_client.vllm.cache_manager import show_encoder_cache
from prefill_client.vllm.row_table import Entry
from prefill_client.vllm.shared_store import StoreQuery
from testing.photos import photo
from testing.vllm_engine import MANAGER, Part, raw
from testing.vllm_sharing import OtherEngine, SharingEngine
from tests.vllm.restartable import Restartable
from tests.vllm.test_answers import TOLERANCE
from tests.vllm.test_service_check import config_of


@pytest.fixture(scope="module")
def engine(checkpoint: Path, store: Restartable) -> Iterator[SharingEngine]:
    """An engine of that store, without vLLM's processor cache, which would reuse the first image of a `uuid`."""
    engine = SharingEngine(checkpoint, store.endpoint, mm_processor_cache_gb=0)
    yield engine
    engine.close()


@pytest.fixture
def other(engine: SharingEngine, store: Restartable) -> Iterator[OtherEngine]:
    """Another engine, closed when the test ends."""
    other = OtherEngine(engine, store.endpoint)
    yield other
    other.close()


def test_a_part_without_pixels_fails_only_its_request(engine: SharingEngine) -> None:
    hostile = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "x"}
    request_id = engine.start(["x", hostile])
    assert engine.run(request_id)[request_id].reason == "error"
    assert engine.ask(["still there"], own=True).reason == "length"


def parked_with(engine: SharingEngine, other: OtherEngine, seed: int, uuid: str) -> tuple[str, bytes]:
    """Start a request that waits for another engine's image; return its id and its second image, named `uuid`.

    This engine has the lease of the second image.
    """
    other_image, named = photo(200, 150, seed, "PNG"), photo(200, 150, seed + 1, "PNG")
    engine.forget()
    assert other.name(["a", other_image]).state == "yours"
    parked = engine.start(["a", raw(other_image), {**raw(named), "uuid": uuid}])
    engine.run_until(engine.has_lease)
    return parked, named


def test_one_uuid_for_two_images_puts_no_wrong_rows(engine: SharingEngine, other: OtherEngine) -> None:
    parked, named = parked_with(engine, other, 8700, "same")
    another = photo(200, 150, 8702, "PNG")
    # The store was asked about one image, and another is encoded under its name.
    hostile = engine.start([{**raw(another), "uuid": "same"}, "b"])
    assert engine.run(hostile)[hostile].reason == "length"
    engine.abort(parked)
    engine.assert_nothing_is_held()
    engine.forget()
    assert engine.encoded_by(["x", named]) == 1, "no rows were put under its name"


def test_one_uuid_for_images_of_two_sizes_fails_only_its_request(
    engine: SharingEngine, other: OtherEngine
) -> None:
    parked, _ = parked_with(engine, other, 8800, "two")
    hostile = engine.start([{**raw(photo(64, 64, 8802, "PNG")), "uuid": "two"}, "b"])
    assert engine.run(hostile)[hostile].reason == "error"
    other.close()
    assert engine.run(parked)[parked].reason == "length"
    engine.assert_nothing_is_held()


def test_without_outgoing_memory_an_engine_encodes_for_itself(
    engine: SharingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.side._outgoing, "_free", [])
    image = photo(200, 150, 8900, "PNG")
    engine.forget()
    assert engine.ask(["x", image], own=True).reason == "length"
    engine.until_all_is_put()
    monkeypatch.undo()
    engine.forget()
    assert engine.encoded_by(["y", image]) == 1, "the first rows were not put"


@pytest.mark.parametrize("steps", range(0, 8, 2))
def test_an_engine_survives_a_store_killed_at_any_step(
    engine: SharingEngine, store: Restartable, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(shared_store._log, "warning", lambda text, *values: logged.append(text % values))
    images = [photo(200, 150, 9000 + 10 * steps + number, "PNG") for number in range(4)]
    engine.forget()
    before = engine.encoded
    request_id, ended = engine.start(["x", *images], own=True), {}
    for _ in range(steps):
        ended |= engine.step()
    store.kill()
    ended = ended or engine.run(request_id)
    assert ended[request_id].reason == "length"
    engine.forget()
    again = engine.ask(["x", *images], own=True)
    assert again.distance(ended[request_id]) <= TOLERANCE
    assert engine.encoded == before + 8, "nothing is shared, and nothing waits"
    assert len([line for line in logged if "is unavailable" in line]) == 1
    engine.assert_nothing_is_held()
    store.start()
    engine.until(lambda: not engine.side.store.alone)
    engine.forget()
    fresh = photo(200, 150, 9500 + steps, "PNG")
    assert engine.encoded_by(["x", fresh]) == 1
    engine.forget()
    assert engine.encoded_by(["y", fresh]) == 0


def test_an_image_in_vllms_encoder_cache_takes_no_lease(engine: SharingEngine, store: Restartable) -> None:
    cached, other_image = photo(200, 150, 9650, "PNG"), photo(200, 150, 9651, "PNG")
    engine.forget()
    store.kill()
    assert engine.encoded_by(["x", cached]) == 1, "for itself"
    store.start()
    engine.until(lambda: not engine.side.store.alone)
    other = OtherEngine(engine, store.endpoint)
    try:
        assert other.name(["a", other_image]).state == "yours"
        before = engine.encoded
        parked = engine.start(["b", cached, other_image], own=True)
        (waits,) = held_until_named(engine)
        assert waits.query.fetch_task is not None, "it waits for the other engine"
        assert other.name(["c", cached]).state == "yours"
    finally:
        other.close()
    assert engine.run(parked)[parked].reason == "length"
    assert engine.encoded == before + 1, "what the other engine had not made"
    engine.assert_nothing_is_held()


def test_another_cache_manager_is_refused(
    engine: SharingEngine, checkpoint: Path, store: Restartable
) -> None:
    config = config_of(checkpoint, store.endpoint, transfer={"ec_role": "ec_both"}, ec_manager_config=MANAGER)
    with pytest.raises(ValueError, match="ec_both brings its own cache manager"):
        show_encoder_cache(engine.side.gate, config)


def held_until_named(engine: SharingEngine) -> list[Entry[StoreQuery]]:
    """Step until the store has answered for all images that requests hold; return their entries."""
    table = engine.side.table
    engine.run_until(
        lambda: (
            table._entries
            and all(rows in table._leases or rows.query.fetch_task for rows in table._entries.values())
        )
    )
    return list(table._entries.values())


def test_an_image_not_found_in_time_is_encoded_by_the_engine(
    engine: SharingEngine, other: OtherEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Part] = ["a", photo(200, 150, 9600, "PNG")]
    engine.forget()
    assert other.name(parts).state == "yours"
    session = engine.side.store._session
    before = engine.encoded
    monkeypatch.setattr(session, "_settings", replace(session._settings, timeout_s=0.3))
    assert engine.ask(parts, own=True).reason == "length"
    assert engine.encoded == before + 1
    engine.assert_nothing_is_held()
