"""Holders: calls count against a tenant or a host, under any client name; two tenants share one server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.endpoint import host_of
from encoder_contract.errors import OverloadedError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.caller import Identity, caller_of
from encoder_service.api.tenants import Tenants
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import Caller
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo, with_comment
from tests.calls import collect, encoded, named, raw_submit
from tests.gate import Gate
from tests.servers import client_elsewhere, server_and_client, server_of
from tests.tenants import RIGHTS, TOKENS, guarded_by, table, with_token
from tests.waiting import PATIENCE_S, soon, within_some_limit

PICTURE = photo(64, 64, 9100)


def from_peer(peer: str, token: str = "") -> Caller:
    """Return a caller from this address, with this token."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    context = SimpleNamespace(peer=lambda: peer, invocation_metadata=lambda: metadata, auth_context=dict)
    return caller_of(cast(Any, context))


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:50051", "ipv4:10.0.0.7"),
        ("ipv6:[2001:db8:1:2:aaaa::1]:50051", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:bbbb:cccc::9%5D:1", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:3::1]:50051", "ipv6:2001:db8:1:3::/64"),
        ("ipv6:[::ffff:10.0.0.7]:50051", "ipv4:10.0.0.7"),
        ("ipv6:[::1]:50051", "ipv6:::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "ipv6:fe80::/64"),
        ("unix:", "unix:"),
        ("ipv6:[nonsense]:1", "ipv6:[nonsense]"),
    ],
)
def test_a_host_is_an_ipv4_address_or_an_ipv6_network(peer: str, host: str) -> None:
    assert host_of(peer) == host


@pytest.mark.attack("a caller with 2^64 addresses")
def test_all_addresses_of_an_ipv6_network_are_one_holder() -> None:
    identity = Identity(None, None)
    holders = set()
    for number in range(50):
        caller = from_peer(f"ipv6:[2001:db8::{number:x}]:{1000 + number}")
        holders.add(identity.admit(None, caller, pb.Caller(client_id=f"name {number}")).holder)
    assert holders == {"host ipv6:2001:db8::/64"}


def test_without_tenants_the_host_is_the_holder_under_any_client_name() -> None:
    identity = Identity(None, None)

    def holder(host: str, client_id: str) -> str:
        return identity.admit(None, from_peer(f"ipv4:{host}:1"), pb.Caller(client_id=client_id)).holder

    assert holder("10.0.0.1", "chat") == holder("10.0.0.1", "search") == holder("10.0.0.1", "")
    assert holder("10.0.0.1", "chat") != holder("10.0.0.2", "chat")


def test_a_priority_is_at_most_the_tenants_and_0_without_tenants(tmp_path: Path, guarded: Config) -> None:
    path = tmp_path / "priorities.toml"
    path.write_text(
        table("chat", TOKENS["chat"], rights=["submit"])
        + table("search", TOKENS["search"], rights=["submit"])
        + "max_priority = 3\n"
    )
    tenants = Identity(Tenants(str(path)), guarded.fleet_key())
    unknown = Identity(None, None)

    def used(identity: Identity, priority: int, token: str = "") -> int:
        caller = from_peer("ipv4:10.0.0.1:1", token)
        return identity.admit(
            identity.require("submit", caller), caller, pb.Caller(priority=priority)
        ).priority

    assert [used(unknown, requested) for requested in (8, 1, 0, -8)] == [0, 0, 0, -8]
    assert [used(tenants, requested, TOKENS["chat"]) for requested in (8, 0, -3)] == [0, 0, -3]
    assert [used(tenants, requested, TOKENS["search"]) for requested in (8, 3, 2, -3)] == [3, 3, 2, -3]


# Two users of a tenant, and two tenants, at one server


@pytest.mark.attack("one user of a platform that floods the server through a render server")
@pytest.mark.parametrize("by_salt", [True, False])
async def test_users_of_one_tenant_have_shares_of_their_own(
    config: Config, model: Model, gate: Gate, tmp_path: Path, by_salt: bool
) -> None:
    """Both users call with one token over one connection, as a render server does; one submits all that it can."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        table("render", TOKENS["chat"], rights=RIGHTS["chat"]) + f"shares_by_salt = {by_salt}\n".lower()
    )
    async with (
        server_of(
            guarded_by(tenants, config), gate.before(model), max_queued_images=32, decode_threads=1
        ) as server,
        await EncoderClient.connect(
            server.endpoint, credentials=with_token(tmp_path, TOKENS["chat"])
        ) as client,
    ):
        flooding, victim = client.for_tenant(b"flooding"), client.for_tenant(b"victim")

        async def render(user: EncoderClient, number: int, *, fits: bool) -> None:
            timeout_s = PATIENCE_S if fits else 2.0  # an image that does not fit is tried again until then
            (answer,) = await user.submit(
                [with_comment(PICTURE, number)], request_id=f"r{number}", timeout_s=timeout_s
            )
            assert (answer.error is None) is fits

        with gate.closed():
            three_quarters = range(24)
            await asyncio.gather(*(render(flooding, number, fits=True) for number in three_quarters))
            await asyncio.gather(*(render(flooding, number, fits=False) for number in range(24, 40)))
            await render(victim, 100, fits=by_salt)
            holders = {job.holder for job in server.jobs._jobs.values()}
            assert len(holders) == (2 if by_salt else 1)
            assert all(holder.startswith("tenant render") for holder in holders)
            assert not any(word in holder for holder in holders for word in ("flooding", "victim"))
            if not by_salt:
                return
            wanted = [(victim, 100), *((flooding, number) for number in three_quarters)]

            async def want(user: EncoderClient, number: int) -> None:
                digest = content_digest(with_comment(PICTURE, number))
                assert (await collect(user, [RowRequest(digest)]))[0].error is None

            fetching = [asyncio.create_task(want(*each)) for each in reversed(wanted)]
            await soon(lambda: server.jobs.scheduler.snapshot().claims == 50)
        await asyncio.gather(*fetching)
        assert before_the_victim(server) <= 8


def before_the_victim(server: Server) -> int:
    """Return how many images of another were encoded before the only one of a holder.

    Counted at the store: the order in which answers arrive is that of a busy machine. The first images were being
    decoded already, and two more may be in the victim's batch.
    """
    holders = [entry.holder for entry in server.store.host.entries.values()]
    assert len(holders) == 25
    (victim,) = (holder for holder in holders if holders.count(holder) == 1)
    return holders.index(victim)


@pytest.fixture
async def gated(guarded: Config, model: Model, gate: Gate) -> AsyncIterator[Server]:
    """A server with tenants and a gated decoder, which decodes one image after the other."""
    async with server_of(guarded, gate.before(model), max_queue_s=160.0, decode_threads=1) as server:
        yield server


@asynccontextmanager
async def tenants_of(server: Server, tmp_path: Path) -> AsyncIterator[tuple[EncoderClient, EncoderClient]]:
    """The clients of the tenants `chat` and `search`."""
    of = [with_token(tmp_path, TOKENS[name]) for name in ("chat", "search")]
    async with (
        await EncoderClient.connect(server.endpoint, credentials=of[0]) as chat,
        await EncoderClient.connect(server.endpoint, credentials=of[1]) as search,
    ):
        yield chat, search


@pytest.mark.attack("a high priority, a flood of requests, another tenant's request identifier")
async def test_requests_of_one_tenant_do_not_delay_another_tenant(
    gated: Server, gate: Gate, tmp_path: Path
) -> None:
    """The attacker uses priority 8, the victim's request identifier, and 24 earlier requests."""

    async def want(client: EncoderClient, number: int, **options: Any) -> None:
        (submitted,) = await client.submit([with_comment(PICTURE, number)], **options)
        rows = await collect(client, [RowRequest(submitted.digest)], **options)
        assert submitted.error is rows[0].error is None

    async with tenants_of(gated, tmp_path) as (chat, search):
        with gate.closed():
            flood = [asyncio.create_task(want(chat, n, priority=8, request_id=f"r{n}")) for n in range(24)]
            await soon(lambda: gated.jobs.scheduler.snapshot().claims == 48)
            victim = asyncio.create_task(want(search, 100, request_id="r0"))
            await soon(lambda: gated.jobs.scheduler.snapshot().claims == 50)
            assert gated.jobs.scheduler.snapshot().requests == 25, "r0 is another request for each tenant"
        await asyncio.gather(victim, *flood)
    assert before_the_victim(gated) <= 8


@pytest.mark.attack("images that fill the seconds of the queue")
async def test_a_tenant_cannot_fill_all_seconds_of_the_queue(
    gated: Server, gate: Gate, tmp_path: Path
) -> None:
    async with tenants_of(gated, tmp_path) as (chat, search):
        (first,) = await chat.submit([PICTURE])
        assert (await collect(chat, [RowRequest(first.digest)]))[0].error is None
        assert first.grid is not None
        # As if encoding an image of this size had taken 16 of the 160 s.
        gated.jobs.scheduler._admission.rate.add(first.grid.patches * 10**6, 16 * 10**6)
        with gate.closed():

            async def refused(limit_s: float) -> bool:
                # Requests of one image each: an empty queue accepts all images of one request.
                flood = [
                    chat.submit([with_comment(PICTURE, n)], request_id=f"r{n}", timeout_s=limit_s)
                    for n in range(24)
                ]
                answers = [answer for each in await asyncio.gather(*flood) for answer in each]
                assert sum(each.error is None for each in answers) <= 8
                return {type(each.error) for each in answers if each.error} == {OverloadedError}

            await within_some_limit(refused)
            assert 5 <= len(gated.jobs) <= 8
            (other,) = await search.submit([with_comment(PICTURE, 100)], timeout_s=PATIENCE_S)
            assert other.error is None


async def test_stored_rows_count_against_the_tenant_that_encoded_them(
    tmp_path: Path, guarded: Config, model: Model
) -> None:
    async with server_of(guarded, model) as server:
        credentials = with_token(tmp_path, TOKENS["chat"])
        async with await EncoderClient.connect(server.endpoint, credentials=credentials) as client:
            await encoded(client, PICTURE)
        assert [entry.holder for entry in server.store.host.entries.values()] == ["tenant chat"]


@pytest.mark.attack("refused uploads, to evict kept files")
async def test_a_file_that_the_queue_refuses_is_not_kept(config: Config, model: Model, gate: Gate) -> None:
    """Otherwise refused uploads would evict files of others. The names have no grid: only the bytes show the size."""
    async with server_and_client(config, gate.before(model), max_queued_images=4) as (server, client):
        with gate.closed():
            states = await raw_submit(client, [named(n, with_comment(PICTURE, n)) for n in range(12)])
            last = [each[-1].state for each in states.values()]
            assert {pb.STATE_QUEUED, pb.STATE_FAILED} == {*last}
            assert len(server._sources) == last.count(pb.STATE_QUEUED)


# A host without tenants


@pytest.mark.attack("a caller with many names")
async def test_a_host_with_many_invented_names_leaves_room_for_others(
    config: Config, model: Model, gate: Gate
) -> None:
    async with (
        server_and_client(config, gate.before(model), max_queued_images=64) as (server, client),
        client_elsewhere(server) as newcomer,
    ):
        with gate.closed():
            accepted = 0
            for begin in range(0, 96, 8):
                images = [named(n, with_comment(PICTURE, begin + n)) for n in range(8)]
                states = await raw_submit(client, images, client_id=f"invented {begin}")
                accepted += sum(each[-1].state == pb.STATE_QUEUED for each in states.values())
            assert accepted == 48, "three quarters"
            states = await raw_submit(newcomer, [named(0, with_comment(PICTURE, 96))])
            assert states[0][-1].state == pb.STATE_QUEUED
