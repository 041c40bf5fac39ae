"""`encoder-service evict`, `flush` and `reload`: the operator's side of the admin calls."""

import os
from collections.abc import Iterator
from typing import Any

import grpc

from encoder_contract.credentials import NO_CREDENTIALS, Credentials, why_unconnected
from encoder_contract.direct import NO_PROXY
from encoder_contract.endpoint import is_local
from encoder_contract.segment_file import segment_proof
from encoder_contract.v1 import admin_pb2, encoder_pb2
from encoder_contract.v1.admin_pb2_grpc import AdminServiceStub
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub

TIMEOUT_S = 10.0
ADDRESS_BYTES = 32
# Notice a server that has stopped within ten seconds.
PINGS = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
)


class OperatorError(Exception):
    """The server cannot be reached, or refuses the operator call."""


def run(
    command: str,
    server: str,
    *,
    address: str = "",
    folder: str = "",
    credentials: Credentials = NO_CREDENTIALS,
) -> Iterator[str]:
    """Run one command; yield the texts to print. Raises `OperatorError`."""
    try:
        evicted_address = _address(address) if command == "evict" else b""
        with _channel(server, credentials) as channel:
            metadata = _token_metadata(server, credentials)
            limits: dict[str, Any] = {"timeout": TIMEOUT_S, "metadata": metadata}
            proof = _proof(channel, server, limits)
            stub: AdminServiceStub = AdminServiceStub(channel)
            if command == "flush":
                flushed = stub.Flush(admin_pb2.FlushRequest(proof=proof), **limits)
                yield f"{flushed.entries} entries dropped"
            elif command == "reload":  # as long as it takes: the pings notice a server that has gone
                reload = admin_pb2.ReloadRequest(proof=proof, folder=os.path.abspath(folder))
                for answer in stub.Reload(reload, metadata=metadata):
                    yield answer.step
            else:
                evict = admin_pb2.EvictRequest(proof=proof, address=evicted_address)
                if not stub.Evict(evict, **limits).evicted:
                    raise OperatorError(f"{server}: not dropped: it is not held, or in use")
                yield "dropped"
    except ValueError as error:
        raise OperatorError(str(error)) from error
    except grpc.RpcError as error:
        raise OperatorError(f"{server}: {_reason(error, credentials)}") from error


def _channel(server: str, credentials: Credentials) -> grpc.Channel:
    certificates = credentials.certificates()
    options = (*NO_PROXY, *PINGS)
    if certificates is None:
        return grpc.insecure_channel(server, options)  # admin calls work only within this host
    pem, name = certificates.pem, credentials.server_name
    override = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.secure_channel(
        server,
        grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None),
        (*options, *override),
    )


def _token_metadata(server: str, credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """Return the token as metadata. Raises `OperatorError` if it would leave this host unencrypted."""
    metadata = credentials.token().metadata()
    if metadata and not credentials.ca and not is_local(server):
        raise OperatorError(f"{server}: a token is sent only over TLS (--tls-ca), or within this host")
    return metadata


def _proof(channel: grpc.Channel, server: str, limits: dict[str, Any]) -> bytes:
    description = EncoderServiceStub(channel).Describe(encoder_pb2.DescribeRequest(), **limits)
    proof = segment_proof(server, description.shm_segment)
    if not proof:
        raise OperatorError(
            f"{server}: cannot read the server's shared memory: run this as the server's user on the server's host"
        )
    return proof


def _reason(error: Any, credentials: Credentials) -> str:
    """Return the reason for a failed call, without the boilerplate of gRPC's core."""
    text = str(error.details() if hasattr(error, "details") else error)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no server answered within {TIMEOUT_S:g} s"
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return text
    return f"no server answers ({why_unconnected(text, credentials)})"


def _address(text: str) -> bytes:
    try:
        address = bytes.fromhex(text)
    except ValueError:
        address = b""
    if len(address) != ADDRESS_BYTES:
        raise OperatorError(
            f"{text!r} is not an address: give its 64 hexadecimal digits, as `prefill-client encode` prints them"
        )
    return address
