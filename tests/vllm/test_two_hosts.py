"""A real engine here and the service on another host: a network namespace (Linux, root, iproute2)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import Part, VllmEngine
from tests.another_host import another_host
from tests.vllm.service import SERVICE, SETTINGS

TOLERANCE = 1e-5  # of a log-probability


@pytest.fixture
def far_service(checkpoint: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint on another host, with a rows port."""
    with (
        another_host() as host,
        host.serving(checkpoint, tmp_path / "encoder-service", SERVICE, **SETTINGS) as server,
    ):
        yield server


@pytest.mark.story("rows from another host")
def test_rows_of_another_host_come_by_tcp_and_give_the_answers_of_the_own_tower(
    checkpoint: Path, far_service: ServerProcess
) -> None:
    engine = VllmEngine(checkpoint, far_service.endpoint)
    try:
        for images in (1, 3):
            parts: list[Part] = ["what is this?"]
            parts += [photo(300, 200 + 10 * number, 10 * images + number) for number in range(images)]
            assert engine.ask(parts).distance(engine.ask(parts, own=True)) <= TOLERANCE
        engine.assert_nothing_is_held()
    finally:
        engine.close()
    sent = far_service.metrics()
    assert sent.total("transfer_bytes_total", transport="tcp") > 0
    assert sent.total("transfer_bytes_total", transport="inline") == 0
