"""What sharing costs an engine of vLLM that encodes itself, and what it saves: a real engine, a real store."""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.harness.method_timer import MethodTimer
from testing.photos import photo

if TYPE_CHECKING:
    from testing.vllm_sharing import SharingEngine

# Sides of images over 256×256; the processor of the benchmark's model takes up to 512×512 as they are.
SIDES = (288, 384, 512)
IMAGES = 4  # of a prompt that misses
# All that runs in the scheduler's and the worker's step; the rest is on threads.
METHODS = (
    "ensure_cache_available", "has_cache_item", "update_state_after_alloc", "update_state_after_free",
    "build_connector_meta", "take_unavailable_requests", "update_connector_output", "get_ec_connector_stats",
    "request_finished", "start_load_caches", "save_caches", "build_connector_worker_meta",
)  # fmt: skip


def sharing_figures(model: Path, endpoint: str, rounds: int, options: dict[str, Any]) -> dict[str, float]:
    """Return what putting takes of a step when everything misses, and what a hit takes of a miss."""
    from testing.vllm_sharing import SharingEngine

    engine = SharingEngine(model, endpoint, **options)
    try:
        photos = _photos()
        _first_token_s(engine, [next(photos)])  # warms it up
        return {
            "share_step_overhead_percent": round(_overhead_percent(engine, photos, rounds), 2),
            **_hits(engine, rounds),
        }
    finally:
        engine.close()


def _overhead_percent(engine: "SharingEngine", photos: Iterator[bytes], rounds: int) -> float:
    """Return how much of the steps of prompts whose images all miss is the connector's."""
    from vllm.distributed.ec_transfer import get_ec_transfer

    timer = MethodTimer()
    for connector in {id(each): each for each in (engine.scheduler.ec_connector, get_ec_transfer())}.values():
        timer.watch(connector, METHODS)
    shares = []
    for _ in range(rounds):
        files = [next(photos) for _ in range(IMAGES)]
        encoded, timer.spent_s = engine.encoded, 0.0
        steps_s = _first_token_s(engine, files)
        assert engine.encoded == encoded + IMAGES, "everything misses"
        shares.append(100 * timer.spent_s / steps_s)
        engine.until_all_is_put()
    return median(shares)


def _hits(engine: "SharingEngine", rounds: int) -> dict[str, float]:
    """Return the time to the first token by an image's side: encoded here, or put by an engine before."""
    told: dict[str, float] = {}
    for side in SIDES:
        photos, misses, hits = _photos(side), [], []
        for _ in range(rounds):
            parts = [next(photos)]
            misses.append(_first_token_s(engine, parts))
            engine.until_all_is_put()
            engine.forget()
            encoded = engine.encoded
            hits.append(_first_token_s(engine, parts))
            assert engine.encoded == encoded, "a hit"
        told |= {
            f"miss_{side}_ms": round(1000 * median(misses), 1),
            f"hit_{side}_ms": round(1000 * median(hits), 1),
        }
    worst = max(told[f"hit_{side}_ms"] / told[f"miss_{side}_ms"] for side in SIDES)
    return {**told, "hit_over_miss": round(worst, 2)}


def _first_token_s(engine: "SharingEngine", parts: list[bytes]) -> float:
    """Return the time of the steps until a prompt's first token, and between them."""
    request_id, ended = engine.start(parts, own=True, tokens=1), {}
    begun = time.perf_counter()
    while request_id not in ended:
        ended = engine.step()
    return time.perf_counter() - begun


def _photos(side: int = SIDES[-1]) -> Iterator[bytes]:
    seed = time.time_ns() // 1000  # others in every run: nothing is in the store
    while True:
        seed += 1
        yield photo(side, side, seed)
