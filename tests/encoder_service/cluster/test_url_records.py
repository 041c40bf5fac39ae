"""Records of URLs and the claims on them: the same contract in memory, in Redis and in a Redis Cluster."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from encoder_contract.fleet_key import FleetKey
from encoder_service.cluster.index import RedisIndex, namespace
from encoder_service.cluster.index.schema import Keys
from encoder_service.cluster.url_records import (
    MAX_RECORDS,
    MemoryUrlRecords,
    SealedUrlRecords,
    UrlAnswer,
    UrlRecords,
)
from testing.holding import Holding
from testing.redis_servers import RedisServer, redis_server
from tests.index_replicas import MODEL, as_replica, new_addresses, numbers, redis_settings
from tests.waiting import soon

OURS, THEIRS = b"our claim", b"their claim"
LONG_MS = 600_000


@pytest.fixture(params=["memory", "redis", "cluster"])
async def records(request: pytest.FixtureRequest) -> AsyncIterator[UrlRecords]:
    """What keeps the records."""
    if request.param == "memory":
        yield MemoryUrlRecords()
        return
    url, space = request.getfixturevalue(f"{request.param}_url"), namespace(f"test{next(numbers)}", MODEL)
    index = RedisIndex(redis_settings(url, space), Holding(), ())
    await index.register(as_replica("a"))
    yield index.url_records
    await index.close()


@pytest.fixture
def key() -> bytes:
    (key,) = new_addresses(1)
    return key


async def look(records: UrlRecords, key: bytes, claim: bytes = OURS, *, insist: bool = False) -> UrlAnswer:
    answer = await records.look(key, claim, LONG_MS, insist=insist)
    assert answer is not None
    return answer


async def test_the_first_who_looks_gets_the_claim_and_the_others_do_not(
    records: UrlRecords, key: bytes
) -> None:
    assert await look(records, key) == UrlAnswer(is_claimed=True)
    assert await look(records, key, THEIRS) == UrlAnswer()
    (other,) = new_addresses(1)
    assert await look(records, other, THEIRS) == UrlAnswer(is_claimed=True)


async def test_a_fresh_record_is_there_for_all_and_a_claim_only_for_who_insists(
    records: UrlRecords, key: bytes
) -> None:
    await records.record(key, b"record", LONG_MS, LONG_MS)
    assert await look(records, key) == UrlAnswer(b"record", is_fresh=True)
    assert await look(records, key, insist=True) == UrlAnswer(b"record", is_fresh=True, is_claimed=True)
    assert await look(records, key, THEIRS, insist=True) == UrlAnswer(b"record", is_fresh=True)


async def test_a_stale_record_is_there_with_the_claim(records: UrlRecords, key: bytes) -> None:
    await records.record(key, b"record", LONG_MS, 0)
    assert await look(records, key) == UrlAnswer(b"record", is_claimed=True)
    assert await look(records, key, THEIRS) == UrlAnswer(b"record")
    await records.record(key, b"newer", LONG_MS, LONG_MS)
    assert await look(records, key, THEIRS) == UrlAnswer(b"newer", is_fresh=True)
    await records.record(key, b"stale at once", LONG_MS, 0)
    assert (await look(records, key, THEIRS)).is_fresh is False


async def test_a_claim_ends_when_who_has_it_says_so_and_at_nobody_elses_word(
    records: UrlRecords, key: bytes
) -> None:
    await look(records, key)
    await records.end_claim(key, THEIRS)
    assert not (await look(records, key, THEIRS)).is_claimed
    await records.end_claim(key, OURS)
    assert (await look(records, key, THEIRS)).is_claimed
    await records.end_claim(key, THEIRS, 100)
    await soon(lambda: _is_free(records, key))


async def _is_free(records: UrlRecords, key: bytes) -> bool:
    return (await look(records, key, b"somebody")).is_claimed


async def test_everything_ends_by_itself(records: UrlRecords, key: bytes) -> None:
    assert (await records.look(key, OURS, 200, insist=False)) == UrlAnswer(is_claimed=True)
    await records.record(key, b"record", 400, 200)
    await soon(lambda: _is_gone(records, key))


async def _is_gone(records: UrlRecords, key: bytes) -> bool:
    answer = await records.look(key, b"somebody", 1, insist=False)
    return answer is not None and (answer.record, answer.is_claimed) == (b"", True)


async def test_memory_is_bounded_and_the_least_recently_used_go_first() -> None:
    records = MemoryUrlRecords()
    for number in range(MAX_RECORDS + 10):
        await records.record(number.to_bytes(32, "big"), b"record", LONG_MS, LONG_MS)
        await records.look(number.to_bytes(32, "big"), OURS, LONG_MS, insist=True)
    assert len(records._records) == len(records._claims) == MAX_RECORDS
    assert (await look(records, bytes(32), THEIRS)).is_claimed


async def test_only_what_the_fleet_signed_under_this_key_is_a_record(
    redis_url: str, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    space = namespace(f"test{next(numbers)}", MODEL)
    index = RedisIndex(redis_settings(redis_url, space), Holding(), ())
    await index.register(as_replica("a"))
    try:
        fleet = FleetKey([b"the secret of the fleet, 32 bytes"])
        other = FleetKey([b"another secret, 32 bytes or more."])
        sealed = SealedUrlRecords(index.url_records, fleet)
        await sealed.record(key, b"record", LONG_MS, LONG_MS)
        assert await look(sealed, key) == UrlAnswer(b"record", is_fresh=True)
        (elsewhere,) = new_addresses(1)
        for forged in (
            b"record",
            b"",
            other.seal_url(key, b"record"),
            fleet.seal_file(key, b"record"),
            fleet.seal_url(elsewhere, b"record"),
            fleet.seal_url(key, b"r" * 2000),
        ):
            await index.url_records.record(key, forged, LONG_MS, LONG_MS)
            assert (await look(sealed, key)).record == b""
        assert sealed.foreign == 4
        assert "not signed" in caplog.text
    finally:
        await index.close()


async def test_while_redis_is_gone_nothing_is_known_and_nothing_raised() -> None:
    server: RedisServer
    with redis_server() as server:
        index = RedisIndex(redis_settings(server.url, "gone"), Holding(), ())
        await index.register(as_replica("a"))
        try:
            (key,) = new_addresses(1)
            assert (await look(index.url_records, key)).is_claimed
            server.kill()
            async with asyncio.timeout(60):
                await soon(lambda: _cannot_say(index.url_records, key))
            await index.url_records.record(key, b"record", LONG_MS, LONG_MS)
            await index.url_records.end_claim(key, OURS)
        finally:
            await index.close()


async def _cannot_say(records: UrlRecords, key: bytes) -> bool:
    return await records.look(key, OURS, LONG_MS, insist=False) is None


def test_the_keys_of_a_url_are_in_one_slot_and_in_no_other_namespace(key: bytes) -> None:
    record, fresh, claim = (each.decode() for each in Keys("space").url(key))
    assert len({each.split("{")[1].split("}")[0] for each in (record, fresh, claim)}) == 1
    assert len({record, fresh, claim}) == 3
    assert record.startswith("space:{")
