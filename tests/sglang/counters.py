"""Metrics of the engine about the service, and of the service about the engine."""

import re

from testing.server_process import ServerProcess
from testing.sglang_gateway import GatewayProcess
from tests.waiting import until


def all_fetches(server: ServerProcess, after: int, images: int) -> list[int]:
    """Return `fetches` once calls for so many images are logged: a call is, after its caller has the rows."""
    until(lambda: sum(fetches(server, after)) >= images)
    return fetches(server, after)


def fetches(server: ServerProcess, after: int) -> list[int]:
    """How many images each Fetch call has asked for since the log had `after` lines."""
    lines = (line for line in server.lines[after:] if re.search(r"\bfetch\b", line, re.IGNORECASE))
    return [int(found[1]) for line in lines if (found := re.search(r"images=(\d+)", line))]


def assert_parts(gateway: GatewayProcess, outcome: str, count: float) -> None:
    """Check how many parts had this outcome, once they are counted: SGLang has the rows of a part before that."""

    def counted_now() -> float:
        return gateway.count("parts", f'outcome="{outcome}"')

    until(lambda: counted_now() >= count)
    assert counted_now() == count
