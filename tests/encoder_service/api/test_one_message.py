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
from tests.calls import all_encoded, collect, connection, named, next_states, refused, stub
from tests.gate import Gate
from tests.operator_view import numbers
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

MIB = 1 << 20
PHOTOS = [photo(64 + n, 80, 700 + n) for n in range(16)]
QUEUED, CACHED, FAILED, NEEDS_BYTES = (
    pb.STATE_QUEUED,
    pb.STATE_CACHED,
    pb.STATE_FAILED,
    pb.STATE_NEEDS_BYTES,
)


def whole(files: Sequence[bytes], sent: Sequence[int] | None = None, **fields: Any) -> pb.SubmitRequest:
    """Return one message that submits files, of which those at `sent` come along; None means all."""
    names = [named(index, file)[0] for index, file in enumerate(files)]
    indexes = range(len(files)) if sent is None else sent
    pieces = [pb.ImageBytes(index=index, data=files[index], last=True) for index in indexes]
    return pb.SubmitRequest(
        open=pb.Caller(request_id="whole"),
        names=pb.ImageNames(names=names),
        bytes=pieces,
        last=True,
        **fields,
    )


async def messages_of(call: Any, *requests: pb.SubmitRequest) -> list[pb.SubmitResponse]:
    """Send requests, and return all answers until the server ends the call."""
    for request in requests:
        await call.write(request)
    messages: list[pb.SubmitResponse] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    assert await call.code() is grpc.StatusCode.OK
    return messages


async def test_names_and_files_in_one_message_are_answered_in_one_and_stay_submitted(
    server: Server, client: EncoderClient
) -> None:
    (message,) = await messages_of((await stub(client)).Submit(timeout=PATIENCE_S), whole(PHOTOS))
    assert [(state.index, state.state) for state in message.states] == [(n, QUEUED) for n in range(16)]
    outcomes = await collect(client, [RowRequest(content_digest(file)) for file in PHOTOS])
    assert [outcome.error for outcome in outcomes.values()] == [None] * 16
    (message,) = await messages_of((await stub(client)).Submit(timeout=PATIENCE_S), whole(PHOTOS))
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
    message = (await messages_of((await stub(client)).Submit(timeout=PATIENCE_S), request))[0]
    codes = {state.index: state.error.code for state in message.states}
    assert (codes[0], codes[1], codes[3]) == (0, 3, 3)


@pytest.mark.parametrize(
    ("files", "pieces", "why"),
    [
        ([b"x" * MIB, b"y"], [0, 1], "bytes of files, the limit is"),
        ([b"x"], [0, 0], "must be complete, in one piece"),
    ],
    ids=["too many bytes", "two pieces of one file"],
)
async def test_files_beyond_their_bounds_end_the_call(
    client: EncoderClient, files: list[bytes], pieces: list[int], why: str
) -> None:
    request = whole([file * 2 for file in files] if len(pieces) > len({*pieces}) else files, [])
    request.bytes.extend(
        pb.ImageBytes(index=index, data=files[index] + bytes(32), last=True) for index in pieces
    )
    call: Any = (await stub(client)).Submit(timeout=PATIENCE_S)
    await call.write(request)
    code, details = await refused(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert why in details


async def test_an_incomplete_file_with_its_name_ends_the_call(client: EncoderClient) -> None:
    request = whole(PHOTOS[:1])
    request.bytes[0].last = False
    call: Any = (await stub(client)).Submit(timeout=PATIENCE_S)
    await call.write(request)
    assert (await refused(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_files_for_which_there_is_no_space_are_not_parsed(config: Config, model: Model) -> None:
    """The server answers as if only the names had come."""
    async with (
        server_of(
            config,
            model,
            # The first call keeps its space, however busy this machine is.
            limits={"upload_idle_s": PATIENCE_S},
            max_queued_gib=2 * MIB / GIB,
            max_image_bytes=2 * MIB,
        ) as server,
        await EncoderClient.connect(server.endpoint) as client,
    ):
        large: Any = (await stub(client)).Submit(timeout=PATIENCE_S)
        await large.write(pb.SubmitRequest(open=pb.Caller()))
        name = pb.ImageName(index=0, digest=bytes(32), size_bytes=2 * MIB - 1)
        await large.write(pb.SubmitRequest(names=pb.ImageNames(names=[name])))
        assert [state.state for state in await next_states(large, 1)] == [NEEDS_BYTES]
        (message,) = await messages_of((await stub(client)).Submit(timeout=PATIENCE_S), whole(PHOTOS[:2]))
        assert {state.error.code for state in message.states} == {8}
        large.cancel()
        await soon(lambda: server.budgets.upload_bytes.held == 0)
        (message,) = await messages_of((await stub(client)).Submit(timeout=PATIENCE_S), whole(PHOTOS[:2]))
        assert {state.state for state in message.states} == {QUEUED}


@pytest.mark.parametrize("last", [True, False])
async def test_a_half_closed_call_keeps_complete_images_only_after_its_last_name(
    config: Config, model: Model, gate: Gate, last: bool
) -> None:
    async with server_of(config, gate.before(model)) as server:
        with gate.closed():
            async with await EncoderClient.connect(server.endpoint) as client:
                call: Any = (await stub(client)).Submit(timeout=PATIENCE_S)
                request = whole(PHOTOS[:3], [0, 1])
                request.last = last
                await call.write(request)
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


async def test_files_that_the_server_asks_for_may_come_together(
    server: Server, client: EncoderClient
) -> None:
    call: Any = (await stub(client)).Submit(timeout=PATIENCE_S)
    await call.write(whole(PHOTOS[:4], []))
    assert {state.state for state in await next_states(call, 4)} == {NEEDS_BYTES}
    pieces = [pb.ImageBytes(index=n, data=file, last=True) for n, file in enumerate(PHOTOS[:4])]
    again = pb.ImageBytes(index=1, data=b"once more", last=True)
    (message,) = await messages_of(call, pb.SubmitRequest(bytes=[*pieces[:2], again, *pieces[2:]]))
    assert [(state.index, state.state) for state in message.states] == [(n, QUEUED) for n in range(4)]


async def test_many_files_together_may_exceed_the_largest_file(config: Config, model: Model) -> None:
    most = max(map(len, PHOTOS)) + 100
    async with (
        server_of(config, model, max_image_bytes=most) as server,
        await EncoderClient.connect(server.endpoint) as client,
    ):
        assert sum(map(len, PHOTOS)) > most
        (message,) = await messages_of((await stub(client)).Submit(timeout=PATIENCE_S), whole(PHOTOS))
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
