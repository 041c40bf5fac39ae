"""The connection to Redis or a Redis Cluster: a batch of addresses is one script call, or one call per slot."""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from encoder_service.config import ConfigError, without_password

# All exceptions of a failed call to Redis, including error replies. EOFError: a truncated reply.
FAULTS = (RedisError, RedisClusterException, OSError, TimeoutError, EOFError)
# Error replies: the server is reachable, but not usable until its state or our settings change.
REFUSALS = (ResponseError, AuthenticationError)
# A server that refuses a connection says why at once, and closes it.
FIRST_WORDS_S, FIRST_WORDS_BYTES, FIRST_WORDS_SHOWN = 0.5, 1024, 300
# A script over this many addresses blocks Redis for about two milliseconds.
MAX_BATCH = 256


@contextmanager
def lost_connections() -> Iterator[None]:
    """Turn the errors that redis-py raises when another task closes a connection into `RedisConnectionError`."""
    try:
        yield
    except (AttributeError, RuntimeError) as fault:
        raise RedisConnectionError(f"the connection was closed during the call: {fault}") from fault


@contextmanager
def invalid_replies() -> Iterator[None]:
    """Turn the errors that a reply of the wrong shape causes into `RedisError`: the server may not be Redis at all."""
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RedisError(f"invalid reply: {error}") from error


class Script:
    """A Lua script that takes one or two keys for each address and returns one reply for each address."""

    def __init__(self, name: str) -> None:
        folder = files("encoder_service.cluster.redis") / "lua"
        self.source = (folder / "records.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()


def batches(addresses: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield the distinct addresses in batches of at most `MAX_BATCH`."""
    unique = list(dict.fromkeys(addresses))
    for first in range(0, len(unique), MAX_BATCH):
        yield unique[first : first + MAX_BATCH]


class _ScriptRun(NamedTuple):
    """Keys and arguments of one run of a script."""

    keys: Sequence[bytes]
    arguments: Sequence[Any]


class RedisUrl:
    """A parsed index URL: redis://, rediss://, redis+cluster://host,host or ?cluster=true."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.partition("+")
        query = dict(parse_qsl(parts.query))
        if scheme not in ("redis", "rediss") or kind not in ("", "cluster") or not parts.netloc:
            raise ConfigError(
                f"{without_password(url)}: an index URL must be redis://, rediss:// or redis+cluster://host:port"
            )
        self.is_cluster = kind == "cluster" or query.pop("cluster", "false") == "true"
        credentials, at, hosts = parts.netloc.rpartition("@")
        path, options = parts.path, urlencode(query)
        self.urls = [
            urlunsplit((scheme, credentials + at + host, path, options, ""))
            for host in hosts.split(",")
            if host
        ]

    def node_url(self, host: str, port: int) -> str:
        """Return the URL of one node of the cluster."""
        parts = urlsplit(self.urls[0])
        credentials, at, _ = parts.netloc.rpartition("@")
        bracketed = f"[{host}]" if ":" in host else host
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}{bracketed}:{port}"))


class RedisConnection:
    """An open connection. Its methods raise `FAULTS`; the caller bounds their time."""

    def __init__(self, url: RedisUrl, client: "Redis | RedisCluster", timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client: Any = client  # the two classes share the commands used here, but no type
        self.sharded_channels = False

    @classmethod
    async def open(cls, url: RedisUrl, timeout_s: float) -> Self:
        """Connect, and read what the server supports.

        A socket that takes longer than `timeout_s` to connect or to answer is closed, even if the call's own limit is
        longer.
        """
        try:
            client = _cluster(url, timeout_s) if url.is_cluster else _node(url.urls[0], timeout_s)
            connection = cls(url, client, timeout_s)
        except ValueError as error:
            raise ConfigError(f"--index: the URL has an option with an invalid value: {error}") from error
        try:
            if url.is_cluster:
                await connection._client.initialize()
            server = await connection._client.info("server")
            connection.sharded_channels = int(str(server["redis_version"]).split(".")[0]) >= 7
        except TypeError as error:
            # redis-py passes unknown options of the URL to a constructor: "... argument 'foo'".
            await connection.close()
            option = str(error).rpartition(" ")[2]
            raise ConfigError(f"--index: the URL has an unknown option {option}") from error
        except AuthenticationError:
            await connection.close()
            raise
        except (RedisConnectionError, RedisClusterException) as error:
            await connection.close()
            if words := await first_words(url.urls[0]):
                raise ResponseError(words) from error
            raise
        except BaseException:  # also when cancelled: nothing else would close the connection
            await connection.close()
            raise
        return connection

    async def close(self) -> None:
        """Close every connection; running calls fail."""
        await self._client.aclose()

    async def run(
        self, script: Script, keys: Sequence[Sequence[bytes]], *arguments: Any, each: Sequence[bytes] = ()
    ) -> list[Any]:
        """Run a script over the keys of many addresses; return one reply for each address.

        The script gets `arguments`, followed by the values in `each`, which has one for each address or is empty.
        """
        groups = self._by_slot(keys)
        calls = [
            _ScriptRun(
                [key for position in group for key in keys[position]],
                [*arguments, *(each[position] for position in group if each)],
            )
            for group in groups
        ]
        answers: list[Any] = [None] * len(keys)
        for group, replies in zip(groups, await self._evaluate(script, calls), strict=True):
            for position, reply in zip(group, replies, strict=True):
                answers[position] = reply
        return answers

    async def run_once(self, script: Script, keys: Sequence[bytes], *arguments: Any) -> Any:
        """Run a script over keys of one slot and return its whole reply."""
        return (await self._evaluate(script, [_ScriptRun(keys, arguments)]))[0]

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, with one command, or one for each slot."""
        read = self._client.mget_nonatomic if self.is_cluster else self._client.mget
        with lost_connections():
            values: list[bytes | None] = await read(keys)
        if len(values) != len(keys) or not all(value is None or isinstance(value, bytes) for value in values):
            raise TypeError("expected one value for each key")
        return values

    @property
    def is_cluster(self) -> bool:
        """Whether this is a Redis Cluster."""
        return self._url.is_cluster

    def server_of(self, channel: bytes) -> str | None:
        """Return the URL of the server that has a channel; None if it is unknown."""
        if not self.is_cluster:
            return self._url.urls[0]
        try:
            node = self._client.get_node_from_key(channel)
        except RedisClusterException:
            return None
        return self._url.node_url(node.host, node.port) if node else None

    def listener(self, url: str) -> tuple[Redis, PubSub]:
        """Return a new client for one server, and its subscriptions; the caller closes both."""
        client = _node(url, self._timeout_s)
        return client, client.pubsub()

    def _by_slot(self, keys: Sequence[Sequence[bytes]]) -> list[list[int]]:
        if not self.is_cluster:
            return [list(range(len(keys)))]
        slots: dict[int, list[int]] = defaultdict(list)
        for position, address_keys in enumerate(keys):
            slots[key_slot(address_keys[0])].append(position)
        return list(slots.values())

    # redis-py's `register_script` is not used. On a cluster, it sends the commands of all slots one by one (6 ms for 32
    # addresses; a pipeline takes 2). In a pipeline, it sends SCRIPT EXISTS before every call.
    async def _evaluate(self, script: Script, calls: list[_ScriptRun]) -> list[Any]:
        replies = await self._pipeline("EVALSHA", script.sha, calls)
        # Retry with the script's source: a new, restarted or promoted server does not have the script, and a server may
        # have closed an idle connection. Every script is idempotent, so running it twice does no harm.
        failed = [n for n, r in enumerate(replies) if isinstance(r, (NoScriptError, RedisConnectionError))]
        if failed:
            retried = await self._pipeline("EVAL", script.source, [calls[n] for n in failed])
            for n, reply in zip(failed, retried, strict=True):
                replies[n] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def _pipeline(self, command: str, script: str | bytes, calls: list[_ScriptRun]) -> list[Any]:
        pipeline = self._client.pipeline() if self.is_cluster else self._client.pipeline(transaction=False)
        for keys, arguments in calls:
            pipeline.execute_command(command, script, len(keys), *keys, *arguments)
        with lost_connections():
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies


async def first_words(url: str) -> str:
    """Return why a server refuses every connection, in its own words; empty if it does not.

    In protected mode, or with too many clients, it answers before it is asked. redis-py loses that answer, since its
    first command meets a closed connection.
    """
    parts = urlsplit(url)
    if parts.scheme != "redis":
        return ""
    try:
        async with asyncio.timeout(FIRST_WORDS_S):
            reader, writer = await asyncio.open_connection(parts.hostname or "localhost", parts.port or 6379)
            try:
                said = await reader.read(FIRST_WORDS_BYTES)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""
    if not said.startswith(b"-"):
        return ""
    words = " ".join(said[1:].decode(errors="replace").split())[:FIRST_WORDS_SHOWN]
    return "".join(each if each.isprintable() else "?" for each in words)


def _node(url: str, timeout_s: float) -> Redis:
    # One retry: if the server closed an idle connection of the pool, that is noticed only when the connection is used.
    return Redis.from_url(
        url,
        protocol=2,
        retry=Retry(NoBackoff(), 1),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
    )


def _cluster(url: RedisUrl, timeout_s: float) -> RedisCluster:
    nodes = [urlsplit(each) for each in url.urls]
    return RedisCluster.from_url(
        url.urls[0],
        startup_nodes=[ClusterNode(node.hostname or "localhost", node.port or 6379) for node in nodes],
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
    )
