"""The tables of transports: each transport of the contract has a sender, a receiver and a name."""

import inspect

import pytest

from encoder_contract.credentials import NO_CREDENTIALS
from encoder_contract.errors import InternalError, InvalidRequestError
from encoder_contract.framing import checksum
from encoder_contract.stream import RowReader
from encoder_contract.transports import TRANSPORT_NAMES
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.transport import SENDERS
from prefill_client import TRANSPORTS, EncoderClient, RowRequest
from prefill_client.images import ServerClock
from prefill_client.transport import BY_DEFAULT, RECEIVERS, receivers, select_receivers
from prefill_client.transport.channels import Channels
from prefill_client.transport.receiver import InlineReceiver
from prefill_client.transport.row_stream import RowStream
from testing.photos import photo
from tests.calls import collect, connection
from tests.waiting import PATIENCE_S


def test_every_transport_has_a_sender_a_receiver_and_a_name() -> None:
    assert TRANSPORT_NAMES == {
        pb.TRANSPORT_INLINE: "inline",
        pb.TRANSPORT_SHM: "shm",
        pb.TRANSPORT_DEVICE: "device",
        pb.TRANSPORT_TCP: "tcp",
    }
    assert list(SENDERS) == list(RECEIVERS)
    assert set(RECEIVERS) == set(TRANSPORT_NAMES)
    assert [TRANSPORT_NAMES[transport] for transport in RECEIVERS] == list(TRANSPORTS)
    for transport, receiver in RECEIVERS.items():
        assert receiver.transport == transport
        assert receiver.holds == SENDERS[transport].holds
    for table in (SENDERS, RECEIVERS):
        assert not [each for each in table.values() if inspect.isabstract(each)]


def test_rows_of_a_remote_server_arrive_inline() -> None:
    description = pb.DescribeResponse(shm_segment="/dev/shm/anything", transports=[3, 2, 1])
    channels = Channels(NO_CREDENTIALS)
    assert list(receivers("192.0.2.1:50051", description, channels)) == ["inline"]
    description.rows_port = 50052
    assert list(receivers("192.0.2.1:50051", description, channels)) == ["tcp", "inline"]
    assert list(receivers("unix:/run/encoder", description, channels)) == ["inline"]
    assert list(receivers("ipv4:192.0.2.1:50051", description, channels)) == ["inline"]


def test_a_caller_that_wants_rows_on_a_gpu_gets_those_of_another_host_by_the_rows_port() -> None:
    description = pb.DescribeResponse(rows_port=50052)
    available = receivers("192.0.2.1:50051", description, Channels(NO_CREDENTIALS))
    assert list(select_receivers(["device"], available)) == ["tcp", "inline"]


async def test_the_callers_first_usable_transport_is_used(client: EncoderClient) -> None:
    (image,) = await client.submit([photo(128, 128, 51)])
    for transports, used in (
        (["inline", "shm"], "inline"),
        (["shm", "inline"], "shm"),
        (["shm"], "shm"),
        ([], "inline"),
    ):
        outcomes = await collect(client, [RowRequest(image.digest)], transports=transports)
        assert outcomes[0].transport == used


async def test_an_unknown_transport_is_refused_with_the_known_ones(client: EncoderClient) -> None:
    with pytest.raises(InvalidRequestError, match="unknown transports pigeon: use device, shm, tcp, inline"):
        client.fetch([RowRequest(b"\0" * 32)], transports=["pigeon"])


async def read_by(client: EncoderClient, message: pb.FetchResponse) -> None:
    """Read a Fetch of one window, by inline, whose server sends this message again and again."""

    class Call:
        async def read(self) -> pb.FetchResponse:
            return message

        def add_done_callback(self, _: object) -> None:
            pass

    inline = {"inline": (await connection(client)).receivers["inline"]}
    stream = RowStream(Call(), [RowRequest(b"\0" * 32)], inline, "a server", ServerClock(0, 0, 0), PATIENCE_S)
    await anext(aiter(stream))


async def test_rows_by_an_unrequested_transport_are_an_error(client: EncoderClient) -> None:
    message = pb.FetchResponse(ready=[pb.ImageReady(handle=pb.Handle(segment="/etc/passwd"))])
    with pytest.raises(InternalError, match="shm, which the client did not request"):
        await read_by(client, message)


@pytest.mark.attack("a server that sends a client windows that it did not request")
@pytest.mark.parametrize(
    "message",
    [
        pb.FetchResponse(ready=[pb.ImageReady(index=1, row_bytes=1 << 40)]),
        pb.FetchResponse(ready=[pb.ImageReady(index=1, row_bytes=4, rows=b"rows")]),
        pb.FetchResponse(ready=[pb.ImageReady(index=(1 << 32) - 1, row_bytes=4)]),
        pb.FetchResponse(errors=[pb.ImageError(index=1, code=14, message="gone")]),
    ],
    ids=["huge", "with its rows", "the last", "an error"],
)
async def test_a_window_that_was_not_requested_is_an_error_before_it_takes_memory(
    client: EncoderClient, message: pb.FetchResponse
) -> None:
    with pytest.raises(InternalError, match=r"the server answers window \d+, but 1 were requested"):
        await read_by(client, message)


def received_inside(rows: bytes) -> bytes:
    """Return what arrives of rows inside an announcement of two rows of two float32."""
    fields = {"row_bytes": 16, "checksum": checksum([memoryview(bytes(16))])}
    ready = pb.ImageReady(row_end=2, width=2, dtype="float32", rows=rows, **fields)  # type: ignore[arg-type]
    reader = RowReader(lambda ready: InlineReceiver().receive(ready, lambda: True))
    ((_, arrival),) = reader.read(pb.FetchResponse(ready=[ready]))
    return arrival.rows().copy().tobytes()


def test_rows_inside_an_announcement_are_checked_as_those_that_follow_it() -> None:
    assert received_inside(bytes(16)) == bytes(16)
    with pytest.raises(InternalError, match="arrived damaged"):
        received_inside(b"\1" + bytes(15))
    with pytest.raises(InternalError, match="only 16 are missing"):
        received_inside(bytes(17))


def test_device_rows_come_only_on_request() -> None:
    assert BY_DEFAULT == ("shm", "tcp", "inline")
