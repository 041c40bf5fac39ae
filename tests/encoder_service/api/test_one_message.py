"""One message each way: a Submit with names and files, and a Fetch of rows that are held."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import GIB, Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.calls import all_encoded, begin_submit, collect, connection, named, next_states, refused, stub
from tests.gate import Gate
from tests.operator_view import numbers
from tests.servers import server_and_client
from tests.waiting import PATIENCE_S, soon

MIB = 1 << 20
PHOTOS = [photo(64 + n, 80, 700 + n) for n in range(16)]
QUEUED, CACHED, FAILED = pb.STATE_QUEUED, pb.STATE_CACHED, pb.STATE_FAILED
NEEDS_BYTES = pb.STATE_NEEDS_BYTES


def whole(files: Sequence[bytes], sent: Sequence[int] | None = None) -> pb.SubmitRequest:
    """Return one message that submits files, of which those at `sent` come along; None means all."""
    names = [named(index, file)[0] for index, file in enumerate(files)]
    indexes = range(len(files)) if sent is None else sent
    pieces = [pb.ImageBytes(index=index, data=files[index], last=True) for index in indexes]
    return pb.SubmitRequest(open=pb.Caller(), names=pb.ImageNames(names=names), bytes=pieces, last=True)


async def sent(client: EncoderClient, request: pb.SubmitRequest) -> Any:
    """Begin a Submit with this message; return the call."""
    call = (await stub(client)).Submit(timeout=PATIENCE_S)
    await call.write(request)
    return call


async def messages_of(call: Any) -> list[pb.SubmitResponse]:
    """Return all answers until the server ends the call."""
    messages: list[pb.SubmitResponse] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    assert await call.code() is grpc.StatusCode.OK
    return messages


async def test_names_and_files_in_one_message_are_answered_in_one_and_stay_submitted(
    server: Server, client: EncoderClient
) -> None:
    (message,) = await messages_of(await sent(client, whole(PHOTOS)))
    assert [(state.index, state.state) for state in message.states] == [(n, QUEUED) for n in range(16)]
    outcomes = await collect(client, [RowRequest(content_digest(file)) for file in PHOTOS])
    assert [outcome.error for outcome in outcomes.values()] == [None] * 16
    (message,) = await messages_of(await sent(client, whole(PHOTOS)))
    assert {state.state for state in message.states} == {CACHED}
    assert (await numbers(server)).total("uploaded_bytes_total") == sum(map(len, PHOTOS)), "once"


async def test_rows_that_are_held_come_in_one_message(server: Server, client: EncoderClient) -> None:
    await all_encoded(client, PHOTOS)
    request = pb.FetchRequest(
        images=[pb.FetchImage(index=n, digest=content_digest(file)) for n, file in enumerate(PHOTOS)],
        transports=[pb.TRANSPORT_SHM],
        shm_proof=server.store.segment.segment_id,
    )
    call: Any = (await stub(client)).Fetch(request)
    message = await call.read()
    assert [ready.index for ready in message.ready] == list(range(16))
    assert all(ready.HasField("handle") for ready in message.ready)
    call.cancel()
    assert (await connection(client)).endpoint == server.endpoint


async def test_a_bad_file_in_a_message_fails_alone(client: EncoderClient) -> None:
    files = [PHOTOS[0], b"no image", PHOTOS[1][:200], PHOTOS[2]]
    request = whole(files)
    request.bytes[3].data = PHOTOS[3]  # under the name of another
    message = (await messages_of(await sent(client, request)))[0]
    codes = {state.index: state.error.code for state in message.states}
    assert (codes[0], codes[1], codes[3]) == (0, 3, 3)


@pytest.mark.parametrize(
    ("sizes", "last", "why"),
    [
        ({0: [MIB + 32], 1: [33]}, True, "bytes of files, the limit is"),
        ({0: [33, 33]}, True, "must be complete, in one piece"),
        ({0: [33]}, False, "must be complete, in one piece"),
    ],
    ids=["too many bytes", "two pieces of one file", "an incomplete file"],
)
async def test_files_beyond_their_bounds_end_the_call(
    client: EncoderClient, sizes: dict[int, list[int]], last: bool, why: str
) -> None:
    pieces = [
        pb.ImageBytes(index=index, data=bytes(size), last=last) for index in sizes for size in sizes[index]
    ]
    request = whole(PHOTOS[:2], [])
    request.bytes.extend(pieces)
    code, details = await refused(await sent(client, request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert why in details


async def test_files_for_which_there_is_no_space_are_not_parsed(config: Config, model: Model) -> None:
    """The server answers as if only the names had come."""
    async with server_and_client(
        config,
        model,
        # The first call keeps its space, however busy this machine is.
        limits={"upload_idle_s": PATIENCE_S},
        max_queued_gib=2 * MIB / GIB,
        max_image_bytes=2 * MIB,
    ) as (server, client):
        large = await begin_submit(client, pb.ImageName(digest=bytes(32), size_bytes=2 * MIB - 1))
        assert [state.state for state in await next_states(large, 1)] == [NEEDS_BYTES]
        (message,) = await messages_of(await sent(client, whole(PHOTOS[:2])))
        assert {state.error.code for state in message.states} == {8}
        large.cancel()
        await soon(lambda: server.budgets.upload_bytes.held == 0)
        (message,) = await messages_of(await sent(client, whole(PHOTOS[:2])))
        assert {state.state for state in message.states} == {QUEUED}


@pytest.mark.parametrize("last", [True, False])
async def test_a_half_closed_call_keeps_complete_images_only_after_its_last_name(
    config: Config, model: Model, gate: Gate, last: bool
) -> None:
    async with server_and_client(config, gate.before(model)) as (server, client):
        with gate.closed():
            request = whole(PHOTOS[:3], [0, 1])
            request.last = last
            call = await sent(client, request)
            states = {state.index: state.state for state in await next_states(call, 3)}
            assert states == {0: QUEUED, 1: QUEUED, 2: NEEDS_BYTES}
            await call.done_writing()
            (missing,) = await next_states(call, 1)
            assert (missing.index, missing.state, missing.error.code) == (2, FAILED, 3)
            if last:
                assert await call.read() is grpc.aio.EOF
                assert len(server.jobs) == 2
            else:
                assert (await refused(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
                await soon(lambda: len(server.jobs) <= 1)  # the decoder may have one of them


async def test_files_that_the_server_wants_may_come_together(server: Server, client: EncoderClient) -> None:
    call = await sent(client, whole(PHOTOS[:4], []))
    assert {state.state for state in await next_states(call, 4)} == {NEEDS_BYTES}
    pieces = [pb.ImageBytes(index=n, data=file, last=True) for n, file in enumerate(PHOTOS[:4])]
    again = pb.ImageBytes(index=1, data=b"once more", last=True)
    await call.write(pb.SubmitRequest(bytes=[*pieces[:2], again, *pieces[2:]]))
    (message,) = await messages_of(call)
    assert [(state.index, state.state) for state in message.states] == [(n, QUEUED) for n in range(4)]


async def test_many_files_together_may_exceed_the_largest_file(config: Config, model: Model) -> None:
    most = max(map(len, PHOTOS)) + 100
    async with server_and_client(config, model, max_image_bytes=most) as (_, client):
        assert sum(map(len, PHOTOS)) > most
        (message,) = await messages_of(await sent(client, whole(PHOTOS)))
        assert {state.state for state in message.states} == {QUEUED}


async def test_large_files_are_sent_in_pieces_and_small_ones_together(client: EncoderClient) -> None:
    images = [
        photo(1100, 900, 90, "BMP"), photo(300, 200, 91, "BMP"), photo(700, 600, 92, "BMP"), b"",
        photo(800, 700, 93, "BMP"),
    ]  # fmt: skip
    answers = await client.submit(images)
    assert [answer.error is None for answer in answers] == [True, True, True, False, True]
    outcomes = await collect(client, [RowRequest(content_digest(file)) for file in images if file])
    assert [outcome.error for outcome in outcomes.values()] == [None] * 4
