"""The fleet's key: rows and calls without its signature are refused."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from encoder_contract.fleet_key import SIGNATURE_METADATA, FleetKey
from encoder_contract.framing import checksum, frame_rows
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api.caller import MAX_SKEW_S
from encoder_service.cluster import cluster, redis_cluster
from encoder_service.cluster.peers import FETCH
from encoder_service.cluster.redis import RedisIndex
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import read_images
from testing.holding import cluster_of
from tests.cluster_replica import Replica, Start, held_by, new_photo, starting, through_peer
from tests.operator_view import numbers as metrics_of
from tests.waiting import PATIENCE_S, soon

SECRET, OTHER_SECRET = b"the secret of the fleet, 32 bytes", b"another secret, 32 bytes or more."


@pytest.fixture
def keyed(config: Config, tmp_path: Path) -> Config:
    """Replicas that share a key."""
    path = tmp_path / "fleet-key"
    path.write_bytes(SECRET + b"\n")
    return replace(config, fleet_key_file=str(path))


@pytest.fixture
async def start(keyed: Config, model: Model, redis_url: str) -> AsyncIterator[Start]:
    async with starting(keyed, model, redis_url) as start:
        yield start


Sign = Callable[[bytes, Grid, bytes], bytes]


@dataclass
class Forger:
    """A listed replica that answers every Fetch with made-up rows."""

    index: RedisIndex
    endpoint: str
    requests: list[tuple[pb.FetchRequest, dict[str, Any]]] = field(default_factory=list)

    async def claim_to_hold(self, replica: Replica, file: bytes) -> bytes:
        """Publish an image that it does not hold, wait until the replica locates it, and return its digest."""
        (image,) = read_images([file], replica.client.description.geometry)
        assert image.grid is not None
        await self.index.publish({replica.address(image.digest): image.grid})
        await soon(lambda: replica.locates(image.digest))
        return image.digest


@asynccontextmanager
async def forger(victim: Replica, sign: Sign) -> AsyncIterator[Forger]:
    """Run a forger that signs with `sign`."""
    description = victim.client.description
    forged_peer: Forger

    async def fetch(request: pb.FetchRequest, context: Any) -> AsyncIterator[bytes]:
        forged_peer.requests.append((request, dict(context.invocation_metadata())))
        (image,) = request.images
        address = victim.address(image.digest)
        (location,) = (await victim.index.locate([address]))[address]
        tokens = description.geometry.tokens(location.grid)
        rows = bytes(tokens * description.width * getattr(torch, description.dtype).itemsize)
        ready = pb.ImageReady(
            address=address,
            grid=pb.Grid(t=1, h=location.grid.h, w=location.grid.w),
            row_end=tokens,
            width=description.width,
            dtype=description.dtype,
            row_bytes=len(rows),
            checksum=checksum([memoryview(rows)]),
            signature=sign(address, location.grid, rows),
        )
        yield pb.FetchResponse(ready=[ready]).SerializeToString()
        for message in frame_rows(0, [memoryview(rows)]):
            yield message

    service, _, method = FETCH.strip("/").partition("/")
    handler = grpc.unary_stream_rpc_method_handler(fetch, pb.FetchRequest.FromString)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    forged = cluster_of(victim.index.settings)
    forged_peer = Forger(forged.index, endpoint)
    fingerprints = description.model_fingerprint, description.processor_fingerprint
    await forged.join(cluster.Replica("forger", 1, endpoint, *fingerprints))
    try:
        yield forged_peer
    finally:
        await forged.close()
        await server.stop(None)


def signed_by(secret: bytes) -> Sign:
    return lambda address, grid, rows: FleetKey([secret]).sign_rows(address, grid, [memoryview(rows)])


FORGERIES: dict[str, Sign] = {
    "nothing": lambda *_: b"",
    "noise": lambda *_: bytes(32),
    "another fleet's key": signed_by(OTHER_SECRET),
    "other rows": lambda address, grid, rows: signed_by(SECRET)(address, grid, b"\1" + rows[1:]),
    "another image": lambda _, grid, rows: signed_by(SECRET)(b"b" * 32, grid, rows),
}


@pytest.mark.attack("forged rows between replicas")
@pytest.mark.parametrize("sign", FORGERIES.values(), ids=FORGERIES)
async def test_unsigned_rows_are_refused_and_the_image_is_encoded_here(
    start: Start, sign: Sign, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, the image may come after the time in which the forger is not asked again.
    monkeypatch.setattr(redis_cluster, "QUARANTINE_S", PATIENCE_S)
    b = await start()
    async with forger(b, sign) as forged_peer:
        file = new_photo()
        digest = await forged_peer.claim_to_hold(b, file)
        (submitted,) = await b.client.submit([file])
        assert submitted.error is None
        fetched = await b.fetch_own(digest)
        assert fetched.array.any()
        assert len(forged_peer.requests) == 1
    assert (await metrics_of(b.server)).total("foreign_rows_total") == 1
    assert "not signed with" in caplog.text


async def test_signed_rows_are_accepted(start: Start) -> None:
    """Control for the tests above: the same rows with a valid signature are accepted."""
    b = await start()
    async with forger(b, signed_by(SECRET)) as forged_peer:
        digest = await forged_peer.claim_to_hold(b, new_photo())
        fetched = await b.fetch(digest)
        assert (fetched.error, fetched.source) == (None, "peer")


async def test_replicas_with_the_key_fetch_from_each_other(start: Start) -> None:
    assert (await through_peer(await start(), await start(), new_photo())).source == "peer"


async def test_rows_of_a_replica_with_another_key_are_refused(start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other-key"
    other.write_bytes(OTHER_SECRET)
    a, b = await start(), await start(fleet_key_file=str(other))
    (image,) = await b.client.submit([await held_by(a, seen_by=b)])
    await b.fetch_own(image.digest)


@pytest.mark.attack("an overheard signature")
async def test_a_replayed_signature_is_refused_elsewhere_and_later(start: Start) -> None:
    a, b = await start(), await start()
    (image,) = await a.client.submit([new_photo()])
    await a.fetch(image.digest)
    async with (
        forger(b, FORGERIES["nothing"]) as forged_peer,
        grpc.aio.insecure_channel(a.endpoint) as channel,
    ):
        await a.index.retract([a.address(image.digest)])
        assert image.grid is not None
        await forged_peer.index.publish({a.address(image.digest): image.grid})
        await soon(lambda: b.locates(image.digest))
        await b.fetch(image.digest)
        request, metadata = forged_peer.requests[0]
        fetch: Any = EncoderServiceStub(channel).Fetch

        async def signature_of(signed: bytes) -> bytes:
            call = fetch(request, metadata=((SIGNATURE_METADATA, signed),))
            answer = await call.read()
            call.cancel()
            return bytes(answer.ready[0].signature)

        raw, now = request.SerializeToString(), time.time()
        assert await signature_of(FleetKey([SECRET]).sign_request(a.endpoint, raw, now)) != b""
        for away_s in (-MAX_SKEW_S - 60, MAX_SKEW_S + 60):  # a replayed signature, or a wrong clock
            assert await signature_of(FleetKey([SECRET]).sign_request(a.endpoint, raw, now + away_s)) == b""
        assert await signature_of(metadata[SIGNATURE_METADATA]) == b""
        assert await signature_of(b"") == b""
