"""Metrics of the engine about the service, and of the service about the engine."""

import re

from testing.server_process import ServerProcess
from testing.sglang_engine import SglangEngine
from tests.vllm.restartable import Restartable


def counted(engine: SglangEngine, metric: str, label: str = "") -> float:
    """The sum of `sglang:encoder_service_<metric>_total`, of one label or all."""
    return sum(
        value
        for name, value in engine.metrics().items()
        if name.startswith(f"sglang:encoder_service_{metric}_total") and label in name
    )


def fetched(engine: SglangEngine) -> float:
    """Images whose rows a prefill chunk has fetched."""
    return counted(engine, "images")


def by_own_tower(engine: SglangEngine, reason: str = "") -> float:
    """Images that SGLang's own tower has encoded."""
    return counted(engine, "own_tower_images", reason)


def server_of(service: Restartable) -> ServerProcess:
    assert service.server is not None
    return service.server


def fetches(server: ServerProcess, after: int) -> list[int]:
    """How many images each Fetch call has asked for since the log had `after` lines."""
    lines = (line for line in server.lines[after:] if re.search(r"\bfetch\b", line, re.IGNORECASE))
    return [int(found[1]) for line in lines if (found := re.search(r"images=(\d+)", line))]
