"""Put refusals: incomplete rows, invalid names, and calls over a limit."""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from encoder_contract.errors import Status, UnknownImageError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.config import GIB
from prefill_client import PutImage
from tests.calls import stub
from tests.put_calls import GRID, PRODUCER, TOKENS, RawPut, fetch_put, new_image, nothing_is_left, rows_for
from tests.waiting import soon

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, CANCELLED = 3, 4, 8, 13, 1
HELD, YOURS, WAIT, FAILED = pb.HOLDING_HELD, pb.HOLDING_YOURS, pb.HOLDING_WAIT, pb.HOLDING_FAILED


BROKEN: dict[str, tuple[Any, int]] = {
    "a byte is missing": (lambda rows: (rows[:-1], {}), INVALID_ARGUMENT),
    "a row is missing": (lambda rows: (rows[: -len(rows) // TOKENS], {}), INVALID_ARGUMENT),
    "a byte too many": (lambda rows: (rows + b"x", {}), INVALID_ARGUMENT),
    "nothing came": (lambda _: (b"", {}), INVALID_ARGUMENT),
    "a bit is wrong": (lambda rows: (rows[:-1] + bytes([rows[-1] ^ 1]), {}), INTERNAL),
    "given up": (lambda rows: (rows[:7], {"abandoned": True}), CANCELLED),
}


@pytest.mark.parametrize(("broken", "code"), BROKEN.values(), ids=list(BROKEN))
async def test_incomplete_rows_fail_only_their_image_and_free_its_lease(
    start: Any, broken: Any, code: int
) -> None:
    _, client = await start()
    image, other, rows = new_image(), new_image(), rows_for(client, 5).tobytes()
    call = await RawPut.open(client)
    assert (await call.name(client, image, 1)).holding == YOURS
    assert (await call.name(client, other, 2)).holding == YOURS
    data, fields = broken(rows)
    await call.rows(data, 1)
    if len(data) <= len(rows):
        state = await call.end(rows, 1, **fields)
    else:
        state = await call.state()
    assert (state.index, state.holding, state.error.code) == (1, FAILED, code)
    assert isinstance((await fetch_put(client, image)).error, UnknownImageError)
    assert (await call.name(client, image, 1)).holding == YOURS, "the lease and the index are free again"
    for index, each in ((2, other), (1, image)):
        await call.rows(rows, index)
        assert (await call.end(rows, index)).holding == HELD
        assert (await fetch_put(client, each)).array.tobytes() == rows


NOT_OURS = {
    "width": {"width": 77},
    "dtype": {"dtype": "bfloat16"},
    "grid": {"grid": pb.Grid(t=1, h=3, w=12)},
    "no grid": {"grid": pb.Grid(t=0, h=0, w=0)},
    "a grid too large": {"grid": pb.Grid(t=1, h=4096, w=4096)},
    "two names": {"digest": b"d" * 32},
    "variant": {"variant": pb.Variant(max_pixels=1 << 40)},
    "a long key": {"engine_key": pb.EngineKey(scheme="test", key=b"k" * 65)},
    "no key": {"engine_key": pb.EngineKey(scheme="", key=b"k")},
}


@pytest.mark.parametrize("fields", NOT_OURS.values(), ids=list(NOT_OURS))
async def test_an_invalid_name_fails_only_its_image(start: Any, fields: dict[str, Any]) -> None:
    _, client = await start()
    call = await RawPut.open(client)
    name = new_image().to_message(3, client.description.width, client.description.dtype)
    for field, value in fields.items():
        if isinstance(value, (int, str, bytes)):
            setattr(name, field, value)
        else:
            getattr(name, field).CopyFrom(value)
    good = new_image().to_message(4, client.description.width, client.description.dtype)
    await call.call.write(pb.PutRequest(names=pb.PutNames(names=[name, good])))
    states = {state.index: state for state in (await call.state(), await call.state())}
    assert (states[3].holding, states[3].error.code) == (FAILED, INVALID_ARGUMENT)
    assert states[4].holding == YOURS


async def test_a_second_name_with_another_grid_is_refused_and_the_rows_stay(start: Any) -> None:
    _, client = await start()
    image, rows = new_image(), rows_for(client, 6)
    async with client.put(PRODUCER) as session:
        await session.put((await session.name([image]))[0], rows)
        (answer,) = await session.name([replace(image, grid=GRID._replace(h=GRID.w, w=GRID.h))])
        assert answer.state == "failed"
    assert np.array_equal((await fetch_put(client, image)).array, rows)


FIRST_MESSAGES = {
    "names first": pb.PutRequest(names=pb.PutNames()),
    "nothing": pb.PutRequest(),
    "no producer": pb.PutRequest(open=pb.PutOpen(caller=pb.Caller())),
    "a long producer": pb.PutRequest(open=pb.PutOpen(producer=pb.Producer(model=b"m" * 65))),
}


@pytest.mark.parametrize("first", FIRST_MESSAGES.values(), ids=list(FIRST_MESSAGES))
async def test_a_put_without_a_producer_is_refused(start: Any, first: pb.PutRequest) -> None:
    _, client = await start()
    call = (await stub(client)).Put(timeout=60)
    await call.write(first)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unrequested_rows_end_the_call(start: Any) -> None:
    _, client = await start()
    call = await RawPut.open(client)
    await call.rows(b"rows", 5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.state()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_may_not_exceed_its_names_or_one_piece(start: Any) -> None:
    _, client = await start()
    most = client.description.max_images_per_call
    name = new_image().to_message(0, client.description.width, client.description.dtype)
    for message in (
        pb.PutRequest(names=pb.PutNames(names=[name] * 40 * most)),
        pb.PutRequest(rows=pb.Rows(index=1, data=bytes(2 * messages.PUT_PIECE_BYTES))),
    ):
        call = await RawPut.open(client)
        await call.call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.state()
        assert caught.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    call = await RawPut.open(client)
    await call.call.write(pb.PutRequest(names=pb.PutNames(names=[replace_index(name, most)])))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.state()


def replace_index(name: pb.PutName, index: int) -> pb.PutName:
    other = pb.PutName()
    other.CopyFrom(name)
    other.index = index
    return other


async def test_a_full_call_of_the_longest_names_fits(start: Any) -> None:
    _, client = await start()
    most = client.description.max_images_per_call
    call = await RawPut.open(client)
    names = [
        pb.PutName(
            index=index,
            engine_key=pb.EngineKey(scheme="s" * 32, key=index.to_bytes(64, "big")),
            variant=pb.Variant(min_pixels=2**63, max_pixels=2**63),
            grid=pb.Grid(t=2**31, h=2**31, w=2**31),
            width=2**31,
            dtype="d" * 16,
        )
        for index in range(most)
    ]
    await call.call.write(pb.PutRequest(names=pb.PutNames(names=names)))
    states = [await call.state() for _ in names]
    assert {state.error.code for state in states} == {INVALID_ARGUMENT}
    assert "row" in states[0].error.message


async def test_incomplete_rows_are_bounded_per_caller_with_a_retry_hint(
    start: Any,
) -> None:
    server, client = await start(store_host_gib=1 / 64)  # incomplete rows may have half of the 16 MiB
    rows = rows_for(client, 7, 2304).tobytes()
    call = await RawPut.open(client)
    states = []
    most = (16 << 20) // 2 // len(rows)
    for index in range(most + 1):
        image = new_image(GRID._replace(h=96, w=96))
        assert (await call.name(client, image, index)).holding == YOURS
        await call.rows(rows[:1000], index)
    states.append(await call.state())
    assert states[0].error.code == RESOURCE_EXHAUSTED
    assert states[0].error.retry_after_ms > 0
    assert server.budgets.put_bytes.held <= GIB * server._config.store_host_gib / 2
    call.call.cancel()
    await soon(lambda: nothing_is_left(server))


async def test_rows_that_can_never_fit_are_refused_without_a_retry(start: Any) -> None:
    _, client = await start(store_host_gib=1 / 512)
    call = await RawPut.open(client)
    assert (await call.name(client, new_image(GRID._replace(h=96, w=96)))).holding == YOURS
    await call.rows(b"rows")
    state = await call.state()
    assert (state.error.code, state.error.retry_after_ms) == (INVALID_ARGUMENT, 0)
    assert "--store-host-gib" in state.error.message


async def test_leases_are_bounded_per_caller(start: Any) -> None:
    server, client = await start(max_queued_images=8)
    call = await RawPut.open(client)
    states = [await call.name(client, new_image(), index) for index in range(8)]
    assert {state.holding for state in states} == {YOURS, FAILED}
    assert {state.error.code for state in states} == {0, RESOURCE_EXHAUSTED}
    call.call.cancel()
    await soon(lambda: len(server.leases) == 0)
    async with client.put(PRODUCER) as session:
        assert [answer.state for answer in await session.name([new_image()])] == ["yours"]


async def test_pinned_rows_are_never_overwritten_and_a_full_store_refuses(start: Any) -> None:
    server, client = await start(store_host_gib=1 / 256)  # 4 MiB
    grid = GRID._replace(h=48, w=48)
    rows = rows_for(client, 15, 576)
    images: list[PutImage] = []
    async with client.put(PRODUCER) as session, AsyncExitStack() as holds:
        while True:
            images.append(new_image(grid))
            (answer,) = await session.name([images[-1]])
            answer = await session.put(answer, rows)
            if answer.state == "failed":
                break
            pin = server.store.pin(answer.address)
            assert pin is not None
            holds.enter_context(pin)
        assert answer.error is not None
        assert answer.error.status.value == RESOURCE_EXHAUSTED
    assert len(images) > 1
    assert isinstance((await fetch_put(client, images[-1])).error, UnknownImageError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("transport", ["inline", "shm"])
async def test_rows_with_nan_or_infinity_fail_only_their_image(
    start: Any, transport: Any, value: float
) -> None:
    server, client = await start()
    image, other, rows = new_image(), new_image(), rows_for(client, 5)
    broken = rows.copy()
    broken[3, 5] = value
    async with client.put(PRODUCER, transports=[transport]) as session:
        for each, its_rows in ((image, broken), (other, rows), (image, rows)):
            (answer,) = await session.name([each])
            assert answer.state == "yours"
            answer = await session.put(answer, its_rows)
            if its_rows is broken:
                assert answer.error is not None
                assert answer.error.status is Status.INVALID_ARGUMENT
                assert "row 3 " in answer.error.message
                assert isinstance((await fetch_put(client, each)).error, UnknownImageError)
            else:
                assert answer.state == "held"
    await soon(lambda: nothing_is_left(server))
