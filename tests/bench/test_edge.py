"""The benchmark of what an image costs the server's process, with one call of each kind."""

import asyncio
from pathlib import Path

import pytest

from bench.edge import costs, server_of
from testing.checkpoints import write_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_every_kind_of_call_has_a_cost(tmp_path: Path) -> None:
    with server_of(write_checkpoint(tmp_path), 1, 0.0) as server:
        figures = asyncio.run(costs(server, 1))
    assert {"new_ms", "lag_p99_ms", "upload_far_s"} <= figures.keys()
    assert all(figures[name] > 0 for name in ("new_ms", "hit_ms", "upload_far_s"))
