"""A Redis that refuses: its own words are in the log, once, and readiness says that the index was never joined."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from encoder_service.cluster.redis import connection
from encoder_service.cluster.redis.connection import FAULTS, REFUSALS, RedisConnection, RedisUrl
from testing.redis_servers import RedisServer, redis_server
from tests.operator_view import answer_of
from tests.processes import running
from tests.waiting import PATIENCE_S, soon


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Redis on a busy machine take its time to say why it refuses a connection."""
    monkeypatch.setattr(connection, "FIRST_WORDS_S", PATIENCE_S)


async def refusal(url: str) -> BaseException:
    """Return why Redis refuses a connection."""
    try:
        opened = await RedisConnection.open(RedisUrl(url), PATIENCE_S)
    except FAULTS as fault:
        return fault
    await opened.close()
    raise AssertionError(f"{url} is accepted")


async def test_redis_says_itself_why_it_refuses(redis: RedisServer) -> None:
    client = redis.client()
    client.acl_setuser("powerless", enabled=True, passwords=["+right"], categories=["-@all"])
    by_user = redis.url.replace("redis://", "redis://powerless:{}@")
    with ExitStack() as stack:
        stack.callback(client.close)
        for url, kind, words in (
            (by_user.format("wrong"), AuthenticationError, "invalid username-password pair"),
            (by_user.format("right"), NoPermissionError, "no permissions"),
        ):
            fault = await refusal(url)
            assert words in str(fault)
            assert isinstance(fault, kind)
            assert isinstance(fault, REFUSALS)
        client.config_set("maxclients", 1)  # refuses before it is asked, as in protected mode
        fault = await refusal(redis.url)
        assert "max number of clients reached" in str(fault)
        assert isinstance(fault, ResponseError)
        client.config_set("maxclients", 1000)


def address_beyond_loopback() -> str | None:
    """Return an IPv4 address of this machine that is not loopback; None if it has none."""
    addresses = [each for interface in psutil.net_if_addrs().values() for each in interface]
    of_ipv4 = (each.address for each in addresses if each.family is socket.AF_INET)
    return next((each for each in of_ipv4 if not each.startswith("127.")), None)


async def test_a_server_beside_a_redis_in_protected_mode_says_so(checkpoint: Path) -> None:
    host = address_beyond_loopback()
    if host is None:
        pytest.skip("this machine has only loopback addresses, which protected mode accepts")
    with redis_server("--protected-mode", "yes", bind="") as redis:
        fault = await refusal(f"redis://{host}:{redis.port}")
        assert str(fault).startswith("DENIED Redis is running in protected mode")
        assert isinstance(fault, REFUSALS)
        with running(checkpoint, index=f"redis://{host}:{redis.port}") as server:
            await soon(
                lambda: any(
                    "index: alone " in line and "Redis is running in protected mode" in line
                    for line in server.lines
                )
            )


async def test_a_server_that_redis_refuses_says_so_once_until_it_has_joined(
    checkpoint: Path, redis: RedisServer
) -> None:
    client = redis.client()
    client.config_set("requirepass", "secret")
    with running(checkpoint, index=redis.url) as server:

        def refused() -> int:
            return sum("index: alone " in line and "Authentication required" in line for line in server.lines)

        await soon(lambda: refused() == 1)
        status, text = await asyncio.to_thread(answer_of, f"{server.metrics_url}readyz")
        assert status == 200, "it works alone"
        assert text.splitlines()[0] == "ok"
        assert "never joined: AuthenticationError: Authentication required" in text
        status, text = await asyncio.to_thread(answer_of, f"{server.metrics_url}startz")
        assert (status, "never joined" in text) == (503, True)
        now = await asyncio.to_thread(server.metrics)
        assert now.total("index_never_joined") == 1
        client.auth("secret")
        client.config_set("requirepass", "")

        async def joined() -> bool:
            return (await asyncio.to_thread(answer_of, f"{server.metrics_url}startz"))[0] == 200

        await soon(joined)
        assert (await asyncio.to_thread(answer_of, f"{server.metrics_url}readyz")) == (200, "ok\n")
        now = await asyncio.to_thread(server.metrics)
        assert now.total("index_never_joined") == 0
        assert refused() == 1
    client.close()
