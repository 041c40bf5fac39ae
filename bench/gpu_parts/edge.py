"""Runs `bench.edge` on this machine: what an image costs the server's process, and how many images it can hand out."""

import asyncio
from typing import Any

from bench.edge import costs, figures_of, server_of
from bench.gpu_parts.probe import Probe
from testing.checkpoints import write_checkpoint

OPS = 8


def run(probe: Probe) -> None:
    """Note the figures of `bench.edge`; in a dry run those of one server."""
    model = write_checkpoint(probe.scratch / "model")

    def measure() -> dict[str, Any]:
        if not probe.dry:
            return asyncio.run(figures_of(model, OPS))
        with server_of(model, 1, 0.0) as server:
            return asyncio.run(costs(server, 1))

    probe.attempt({"what": "the server's process"}, measure)
