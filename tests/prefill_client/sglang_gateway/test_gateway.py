"""The gateway between a real server and the sockets of SGLang's receivers."""

import asyncio
import base64
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
import zmq
import zmq.asyncio

from encoder_contract.errors import UnavailableError
from encoder_service.app import Server
from prefill_client import EncoderClient, RowRequest, content_digest
from prefill_client.sglang_gateway import delivery, http_service
from prefill_client.sglang_gateway.frames import Modality
from prefill_client.sglang_gateway.gateway import TOO_MANY_TOKENS
from prefill_client.sglang_gateway.parts import Address, AllowedReceivers, Part
from testing.photos import data_url, photo
from tests.calls import collect
from tests.closed_port import closed_port
from tests.gate import Gate
from tests.image_host import image_host
from tests.operator_view import fetches_wait_for, images_wait, numbers, settled
from tests.sglang_gateways import RunningGateway, gateway_for
from tests.sglang_messages import Message, body_of
from tests.sglang_receiver import LanguageServer
from tests.waiting import PATIENCE_S, START_S, soon

FIRST, SECOND, THIRD = photo(300, 220, 1), photo(256, 400, 2, orientation=6), photo(640, 480, 3)


@pytest.fixture
async def gateway(client: EncoderClient) -> AsyncIterator[RunningGateway]:
    async with gateway_for(client) as running:
        yield running


@pytest.fixture
async def sglang(gateway: RunningGateway) -> AsyncIterator[LanguageServer]:
    async with LanguageServer(gateway.url, ranks=2) as running:
        yield running


async def rows_of(client: EncoderClient, *images: bytes) -> list[np.ndarray]:
    """Fetch the rows of encoded images directly from the service."""
    found = await collect(client, [RowRequest(content_digest(image)) for image in images])
    assert all(rows.error is None for rows in found.values())
    return [found[index].array for index in range(len(images))]


def grids_of(client: EncoderClient, *sizes: tuple[int, int]) -> list[list[int]]:
    return [list(client.description.geometry.grid(*size)) for size in sizes]


def assert_holds(message: Message, rows: np.ndarray, grids: list[list[int]]) -> None:
    assert message.data.grid_dim == grids
    assert message.rows.dtype == rows.dtype
    np.testing.assert_array_equal(message.rows, rows)


async def test_each_image_is_a_part_and_its_rows_are_those_of_the_service(
    gateway: RunningGateway, sglang: LanguageServer, client: EncoderClient, server: Server, gate: Gate
) -> None:
    parts = [[data_url(image)] for image in (FIRST, SECOND, THIRD)]
    with gate.closed():
        asking = asyncio.create_task(sglang.to_tokenizer(*parts))
        await fetches_wait_for(server, 3)  # else one may find its rows in the store
    answer = await asking
    rows = await rows_of(client, FIRST, SECOND, THIRD)
    grids = grids_of(client, (300, 220), (400, 256), (640, 480))  # upright
    for message, expected, grid in zip(answer.parts, rows, grids, strict=True):
        assert_holds(message, expected, [grid])
    assert gateway.count("parts_total", outcome="served") == 3
    assert gateway.count("images_total", source="encoded") == 3
    assert gateway.count("row_bytes_total") == sum(each.nbytes for each in rows)


async def test_rows_of_one_image_are_sent_without_a_copy(
    gateway: RunningGateway, sglang: LanguageServer, client: EncoderClient
) -> None:
    answer = await sglang.to_scheduler([data_url(THIRD)])
    (rows,) = await rows_of(client, THIRD)
    for (message,) in answer.messages:
        assert_holds(message, rows, grids_of(client, (640, 480)))
    ((receivers, delivered),) = gateway.delivery.delivered  # read once for both ranks
    assert len(receivers) == 2
    assert not delivered.flags.writeable, "the mapping of the server's memory is read-only, a copy is not"


async def test_images_of_a_part_keep_their_order(
    sglang: LanguageServer, client: EncoderClient, server: Server
) -> None:
    bare = base64.b64encode(SECOND).decode()
    answer = await sglang.to_tokenizer([data_url(FIRST), bare, data_url(FIRST)], [{"url": data_url(FIRST)}])
    first, second = await rows_of(client, FIRST, SECOND)
    grids = grids_of(client, (300, 220), (400, 256), (300, 220))
    assert_holds(answer.parts[0], np.concatenate([first, second, first]), grids)
    assert_holds(answer.parts[1], first, grids[:1])
    assert (await numbers(server)).total("encoded_images_total", outcome="kept") == 2


async def test_a_part_of_64_images_is_served(sglang: LanguageServer, client: EncoderClient) -> None:
    images = [photo(96, 64, seed) for seed in range(64)]
    (message,) = (await sglang.to_tokenizer([data_url(image) for image in images])).parts
    assert_holds(message, np.concatenate(await rows_of(client, *images)), grids_of(client, *[(96, 64)] * 64))


async def test_ranks_may_register_before_and_after_the_part(
    gateway: RunningGateway, client: EncoderClient
) -> None:
    async with LanguageServer(gateway.url) as sglang:
        socket, port = sglang._bound()
        for number, first in enumerate(("scheduler_receive_url", "encode")):
            body = body_of([data_url(FIRST)], rid=f"request-{number}")
            receiver = {"req_id": body["req_id"], "receive_count": 1, "receive_url": f"127.0.0.1:{port}"}
            calls = {"encode": body, "scheduler_receive_url": receiver}
            begun = asyncio.create_task(sglang._http.post(f"{gateway.url}/{first}", json=calls.pop(first)))
            done, _ = await asyncio.wait([begun], timeout=1 if first == "encode" else None)
            assert bool(done) == (first != "encode"), "a part waits for its receivers"
            ((then, body),) = calls.items()
            answers = [await sglang._http.post(f"{gateway.url}/{then}", json=body), await begun]
            assert [each.status_code for each in answers] == [200, 200]
            message = Message.of(await socket.recv_multipart())
            assert_holds(message, (await rows_of(client, FIRST))[0], grids_of(client, (300, 220)))


async def test_an_image_that_cannot_be_read_fails_its_request_alone(
    gateway: RunningGateway, sglang: LanguageServer
) -> None:
    ((status, message),) = (await sglang.to_tokenizer([data_url(FIRST), data_url(b"no image")])).refusals
    assert (status, message.startswith("image 1: ")) == (400, True), message
    for item, expected in (
        ("file:///etc/passwd", 403),
        ("/etc/passwd", 403),
        ("http://127.0.0.1/a.jpg", 403),
        ({"url": data_url(FIRST), "preprocess_kwargs": {}}, 400),
    ):
        ((status, _),) = (await sglang.to_tokenizer([item])).refusals
        assert status == expected, item
    assert gateway.count("parts_total", outcome="refused") == 5
    assert gateway.count("parts_total", outcome="served") == 0
    assert len((await sglang.to_tokenizer([data_url(FIRST)])).parts) == 1


async def test_a_scheduler_gets_refusable_rows_instead_of_an_error(
    gateway: RunningGateway, sglang: LanguageServer, client: EncoderClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await sglang.to_scheduler([data_url(FIRST), data_url(b"no image")])
    merge = client.description.geometry.merge_size
    for (message,) in answer.messages:
        tokens = [t * h * w // merge**2 for t, h, w in message.data.grid_dim]
        assert tokens == [TOO_MANY_TOKENS, 1]
        assert message.rows.shape == (sum(tokens), 1)
    assert "image 1: " in caplog.text
    assert "zmq_to_tokenizer" in caplog.text
    assert gateway.count("parts_total", outcome="stand_in") == 1


async def test_a_failed_one_of_several_parts_has_blank_rows(
    sglang: LanguageServer, client: EncoderClient
) -> None:
    good, blank = (await sglang.to_scheduler([data_url(FIRST)], ["file:///etc/passwd"] * 2)).parts
    assert_holds(good, (await rows_of(client, FIRST))[0], grids_of(client, (300, 220)))
    merge = client.description.geometry.merge_size
    assert_holds(blank, np.zeros_like(good.rows[:2]), [[1, merge, merge]] * 2)


async def test_audio_is_refused_by_both_back_ends(sglang: LanguageServer) -> None:
    ((status, told),) = (await sglang.to_tokenizer(["sound"], modality="AUDIO")).refusals
    assert (status, "AUDIO is not served" in told) == (400, True)
    (message,) = (await sglang.to_scheduler(["sound"], modality="AUDIO")).parts
    assert message.data.modality == Modality.AUDIO


async def test_image_urls_are_loaded_from_allowed_hosts(client: EncoderClient) -> None:
    async with image_host() as host, gateway_for(client, image_hosts=[host.name]) as gateway:
        host.body = FIRST
        async with LanguageServer(gateway.url) as sglang:
            (message,) = (await sglang.to_tokenizer([f"http://{host.name}/a.jpg"])).parts
            assert_holds(message, (await rows_of(client, FIRST))[0], grids_of(client, (300, 220)))
            ((status, _),) = (await sglang.to_tokenizer(["http://localhost:1/a.jpg"])).refusals
            assert status == 403


async def test_rows_are_sent_only_to_allowed_receivers(client: EncoderClient, server: Server) -> None:
    elsewhere = AllowedReceivers(["10.0.0.0/8"], "1024-65535")
    async with gateway_for(client, allowed=elsewhere) as gateway, LanguageServer(gateway.url) as sglang:
        ((status, message),) = (await sglang.to_tokenizer([data_url(FIRST)])).refusals
        assert (status, "--receivers" in message) == (403, True)
        named = {"req_id": "r", "receive_count": 1, "receive_url": "127.0.0.1:4000"}
        refused = await sglang._http.post(f"{gateway.url}/scheduler_receive_url", json=named)
        assert (refused.status_code, "--receivers" in refused.json()["message"]) == (403, True)
    assert (await numbers(server)).total("encoded_images_total") == 0


async def test_hanging_up_withdraws_the_images(gateway: RunningGateway, server: Server, gate: Gate) -> None:
    async with httpx2.AsyncClient() as http:
        with gate.closed():
            # The decoder may already have one image; the others wait in the queue.
            body = body_of([data_url(photo(200, 160, seed)) for seed in range(12)], port=40000)
            posting = asyncio.create_task(http.post(f"{gateway.url}/encode", json=body, timeout=100))
            await fetches_wait_for(server, 12)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            await soon(lambda: gateway.count("parts_total", outcome="left") == 1)
            await fetches_wait_for(server, 0)
    await soon(lambda: gateway.count("parts_now") == 0)  # the part is counted as left before it ends
    assert gateway.delivery.delivered == []


async def test_pins_are_released_after_success_and_failure(
    gateway: RunningGateway, sglang: LanguageServer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len((await sglang.to_tokenizer([data_url(THIRD)])).parts) == 1
    monkeypatch.setattr(delivery, "CONNECT_S", 0.2)
    with closed_port() as gone:
        body = body_of([data_url(THIRD)], port=Address.parse(gone).port)
        async with httpx2.AsyncClient() as http:
            answer = await http.post(f"{gateway.url}/encode", json=body, timeout=100)
    assert (answer.status_code, "does not accept a connection" in answer.json()["message"]) == (503, True)
    await settled(server, "store_pinned_bytes", 0)


async def test_parts_over_the_bound_wait_for_a_slot(
    client: EncoderClient, server: Server, gate: Gate
) -> None:
    async with gateway_for(client, max_parts=2) as gateway, LanguageServer(gateway.url) as sglang:
        with gate.closed():
            asking = asyncio.create_task(
                sglang.to_tokenizer(*[[data_url(photo(96, 96, seed))] for seed in range(5)])
            )
            await soon(lambda: gateway.count("parts_now") == 5)
            await fetches_wait_for(server, 2)
        assert len((await asking).parts) == 5


async def test_health_is_answered_while_bodies_are_parsed_one_at_a_time(
    client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing megabytes of JSON holds the interpreter, and SGLang drops an encoder whose health checks are late."""
    parse, parsed, held, go_on = Part.parse, list[str](), list[int](), threading.Semaphore(0)

    def parse_later(body: bytes) -> Part:
        parsed.append(threading.current_thread().name)
        assert threading.current_thread() is not threading.main_thread(), "the event loop's"
        assert go_on.acquire(timeout=PATIENCE_S)
        return parse(body)

    monkeypatch.setattr(Part, "parse", parse_later)
    async with (
        gateway_for(client) as gateway,
        LanguageServer(gateway.url) as sglang,
        httpx2.AsyncClient(timeout=PATIENCE_S) as http,
    ):
        asking = asyncio.create_task(sglang.to_tokenizer(*[[data_url(FIRST)]] * 8))
        await soon(lambda: gateway.count("parts_now") == 8)
        for number in range(8):
            await soon(lambda number=number: len(parsed) > number)
            assert (await http.get(f"{gateway.url}/v3/health")).status_code == 200
            held.append(len(parsed) - number)
            go_on.release()
        assert len((await asking).parts) == 8
    assert held == [1] * 8


async def test_parts_wait_for_memory_for_their_rows(
    client: EncoderClient, server: Server, gate: Gate
) -> None:
    rows = client.description.geometry.tokens(client.description.geometry.grid(96, 96))
    enough_for_one = int(1.5 * rows * client.description.row_bytes)
    limits = {"part_row_bytes": enough_for_one, "row_bytes": enough_for_one}
    async with gateway_for(client, **limits) as gateway, LanguageServer(gateway.url) as sglang:
        with gate.closed():
            parts = [[data_url(photo(96, 96, seed))] for seed in range(100, 104)]
            asking = asyncio.create_task(sglang.to_tokenizer(*parts))
            await images_wait(server, 4)
            await fetches_wait_for(server, 1)
        assert len((await asking).parts) == 4


@pytest.mark.parametrize(
    ("limits", "flag"),
    [({"part_row_bytes": 100}, "--part-rows-gib"), ({"max_body_bytes": 1000}, "--max-body-bytes")],
)
async def test_a_part_over_a_limit_is_refused(
    client: EncoderClient, limits: dict[str, int], flag: str
) -> None:
    async with gateway_for(client, **limits) as gateway, LanguageServer(gateway.url) as sglang:
        ((status, message),) = (await sglang.to_tokenizer([data_url(FIRST)])).refusals
        assert (status, flag in message) == (400, True)


async def test_slow_bodies_take_no_slot(client: EncoderClient) -> None:
    async with gateway_for(client, max_parts=2) as gateway, LanguageServer(gateway.url) as sglang:
        host, port = gateway.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for _, writer in slow:
            writer.write(b"POST /encode HTTP/1.1\r\nHost: gateway\r\nContent-Length: 1000\r\n\r\n{")
        await soon(lambda: gateway.count("parts_now") == 8)
        assert len((await sglang.to_tokenizer([data_url(FIRST)])).parts) == 1
        assert gateway.count("parts_now") == 8, "they still send"
        for _, writer in slow:
            writer.close()
        await soon(lambda: gateway.count("parts_total", outcome="left") == 8)


async def test_a_body_that_stalls_is_answered_with_503(
    client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_service, "BODY_S", 0.2)
    async with gateway_for(client) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /encode HTTP/1.1\r\nHost: gateway\r\nContent-Length: 1000\r\n\r\n{")
        assert b" 503 " in await reader.readline()
        writer.close()


async def test_a_part_whose_caller_hangs_up_once_it_has_the_rows_is_served(
    client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_for(client) as gateway, LanguageServer(gateway.url) as sglang:
        sent, gone, deliver = asyncio.Event(), asyncio.Event(), gateway.delivery.deliver

        async def late(*message: Any) -> None:
            """Return once the caller has gone, as when it is quicker than the end of the delivery."""
            await deliver(*message)
            sent.set()
            await gone.wait()

        monkeypatch.setattr("prefill_client.sglang_gateway.gateway.LAST_BYTES_S", PATIENCE_S)
        monkeypatch.setattr(gateway.delivery, "deliver", late)
        socket, port = sglang._bound()
        async with httpx2.AsyncClient() as http:
            body = body_of([data_url(FIRST)], port=port)
            posting = asyncio.create_task(http.post(f"{gateway.url}/encode", json=body, timeout=100))
            await sent.wait()
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        gone.set()
        Message.of(await socket.recv_multipart())
        await soon(lambda: gateway.count("parts_now") == 0)
        assert gateway.count("parts_total", outcome="served") == 1
        assert gateway.count("parts_total", outcome="left") == 0


async def test_a_long_id_is_served(gateway: RunningGateway, sglang: LanguageServer) -> None:
    ((message,),) = [(await sglang.to_scheduler([data_url(FIRST)], req_id="é" * 400)).parts]
    assert message.data.req_id == "é" * 400
    assert gateway.count("parts_total", outcome="served") == 1


async def test_a_rank_that_registers_twice_gets_a_part_once(
    gateway: RunningGateway, sglang: LanguageServer
) -> None:
    (first, port), (second, other) = sglang._bound(), sglang._bound()
    body = body_of([data_url(FIRST)])
    receiver = {"req_id": body["req_id"], "receive_count": 2, "modality": "IMAGE"}
    for each in (port, port, other, other):
        registration = receiver | {"receive_url": f"127.0.0.1:{each}"}
        answer = await sglang._http.post(f"{gateway.url}/scheduler_receive_url", json=registration)
        assert answer.status_code == 200
    assert (await sglang._http.post(f"{gateway.url}/encode", json=body)).status_code == 200
    for receiving in (first, second):
        Message.of(await receiving.recv_multipart())
    ((receivers, _),) = gateway.delivery.delivered
    assert receivers == [Address("127.0.0.1", port), Address("127.0.0.1", other)]


async def test_metrics_are_exposed(gateway: RunningGateway, sglang: LanguageServer) -> None:
    await sglang.to_tokenizer([data_url(FIRST)])
    async with httpx2.AsyncClient(timeout=START_S) as http:
        text = (await http.get(f"{gateway.url}/metrics")).text
    assert 'sglang_gateway_parts_total{outcome="served"} 1.0' in text
    assert "sglang_gateway_part_seconds_count 1.0" in text


async def test_rows_that_could_not_be_sent_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "CONNECT_S", 0.2)
    sending, rows = delivery.Delivery(), np.zeros((64, 128), np.float32)
    watched = weakref.ref(rows)
    gc.disable()  # or it would free them at some later time
    try:
        with closed_port() as gone, pytest.raises(UnavailableError):
            await sending.deliver([Address.parse(gone)], b"frame", rows)
        del rows
        assert watched() is None
    finally:
        gc.enable()
        sending.close()


async def test_small_messages_arrive_although_their_socket_closes_at_once() -> None:
    sending, context = delivery.Delivery(), zmq.asyncio.Context()
    receiver = context.socket(zmq.PULL)
    address = Address("127.0.0.1", receiver.bind_to_random_port("tcp://127.0.0.1"))
    try:
        for number in range(300):
            await sending.deliver([address], b"%d" % number, np.full((64, 128), number, np.float32))
        async with asyncio.timeout(START_S):
            numbers = {int((await receiver.recv_multipart())[0]) for _ in range(300)}
        assert numbers == {*range(300)}
    finally:
        sending.close()
        context.destroy(linger=0)
