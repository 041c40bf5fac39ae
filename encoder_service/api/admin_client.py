"""`encoder-service stats`, `evict` and `flush`: the operator's side of the admin calls."""

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
MIB = 1 << 20
ADDRESS_BYTES = 32


class OperatorError(Exception):
    """The server cannot be reached, or refuses the operator call."""


def run(command: str, server: str, address: str = "", credentials: Credentials = NO_CREDENTIALS) -> str:
    """Run one command and return the text to print. Raises `OperatorError`."""
    try:
        evicted_address = _address(address) if command == "evict" else b""
        with _channel(server, credentials) as channel:
            limits: dict[str, Any] = {"timeout": TIMEOUT_S, "metadata": _token_metadata(server, credentials)}
            proof = _proof(channel, server, limits)
            stub: AdminServiceStub = AdminServiceStub(channel)
            if command == "stats":
                return _table(stub.Stats(admin_pb2.StatsRequest(proof=proof), **limits))
            if command == "flush":
                flushed = stub.Flush(admin_pb2.FlushRequest(proof=proof), **limits)
                return f"{flushed.entries} entries dropped"
            request = admin_pb2.EvictRequest(proof=proof, address=evicted_address)
            evicted = stub.Evict(request, **limits).evicted
            return "dropped" if evicted else "not dropped: it is not held, or in use"
    except ValueError as error:
        raise OperatorError(str(error)) from error
    except grpc.RpcError as error:
        raise OperatorError(f"{server}: {_reason(error, credentials)}") from error


def _channel(server: str, credentials: Credentials) -> grpc.Channel:
    certificates = credentials.certificates()
    if certificates is None:
        return grpc.insecure_channel(server, NO_PROXY)  # admin calls work only within this host
    pem, name = certificates.pem, credentials.server_name
    override = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.secure_channel(
        server,
        grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None),
        (*NO_PROXY, *override),
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
            f"{text!r} is not an address: give its 64 hexadecimal digits, as `stats` prints them"
        )
    return address


def _table(stats: admin_pb2.StatsResponse) -> str:
    lines = [f"{'tier':<8}{'used MiB':>10}{'of':>10}{'pinned':>10}{'entries':>9}{'hits':>10}{'evicted':>9}"]
    for tier in stats.tiers:
        sizes = "".join(f"{n / MIB:>10.1f}" for n in (tier.used_bytes, tier.size_bytes, tier.pinned_bytes))
        lines.append(f"{tier.name:<8}{sizes}{tier.entries:>9}{tier.hits:>10}{tier.evictions:>9}")
    fetched = stats.fetched_stored + stats.fetched_encoded
    share = (
        f"hit rate {stats.fetched_stored / fetched:.0%}" if fetched else "no hit rate: nothing was fetched"
    )
    kept = f"{stats.source_images} image files kept ({stats.source_bytes / MIB:.1f} MiB)"
    lines += ["", f"{share}, {stats.pins} pins, {stats.queued_images} images in progress, {kept}"]
    if stats.largest:
        lines += ["", f"{'largest':<66}{'tier':<8}{'MiB':>8}{'tokens':>8}{'pins':>6}{'hits':>8}"]
    for entry in stats.largest:
        numbers = f"{entry.bytes / MIB:>8.2f}{entry.tokens:>8}{entry.pins:>6}{entry.hits:>8}"
        lines.append(f"{entry.address.hex():<66}{entry.tier:<8}{numbers}")
    return "\n".join(lines)
