"""Image rows on every rank of a tensor-parallel engine: rank 0 broadcasts handles, and each rank maps the rows."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from encoder_contract.errors import UnavailableError
from encoder_contract.handle import Handle
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client import FetchedRows, SharedRows
from prefill_client.transport.channels import from_message
from prefill_client.transport.rows import Rows, element_type, tensor_view

_LENGTH = struct.Struct("<I")
_FAILED = "another rank failed or cannot read all of the rows: is it on rank 0's host?"


@contextmanager
def rows_on_every_rank(
    outcomes: Sequence[FetchedRows] | None, group: dist.ProcessGroup | None = None
) -> Iterator[list[Tensor]]:
    """Lend every rank the rows [rows, width] that rank 0 fetched, for the duration of the `with` block.

    Every rank enters the block: rank 0 with `outcomes`, the others with None. Rank 0 keeps the Fetch of the outcomes
    open during the block, which holds the rows for all ranks. A handle names rows of this host and has a few hundred
    bytes; rows that arrived inline are broadcast themselves.

    All ranks leave together. An error on one rank, in the block too, is raised on all ranks. A failed image raises its
    error everywhere. Rows that a rank cannot map, or that were lost by the end of the block, raise `StaleHandleError`
    on that rank and `UnavailableError` on the others. Discard what was computed from lost rows; rank 0 fetches them
    again (`FetchedRows.again`).
    """
    messages = _parse(_broadcast(pack(outcomes) if outcomes is not None else None, group))
    for message in messages:
        if message.HasField("error"):
            raise from_message(message.error)
    sources = outcomes if outcomes is not None else [None] * len(messages)
    with ExitStack() as reading:
        with _together(group):
            shared = iter(
                [
                    _lent(m, source, reading)
                    for m, source in zip(messages, sources, strict=True)
                    if _has_handle(m)
                ]
            )
        rows = [
            next(shared) if _has_handle(message) else _rows(message, source, group)
            for message, source in zip(messages, sources, strict=True)
        ]
        with _together(group):
            yield rows
            reading.close()  # inside `_together`, so that a rank whose rows were replaced fails all ranks


def pack(outcomes: Sequence[FetchedRows]) -> bytes:
    """Serialize the outcomes for the broadcast, without rows. Rows that have no handle are broadcast after this."""
    packed = []
    for outcome in outcomes:
        if outcome.error is not None:
            error = pb.ImageError(
                index=outcome.index, code=outcome.error.status.value, message=outcome.error.message
            )
            message = pb.FetchResponse(error=error)
        else:
            ready = pb.ImageReady(
                index=outcome.index,
                row_end=outcome.shape[0],
                width=outcome.shape[1],
                dtype=outcome.dtype,
                handle=outcome.handle.to_message() if outcome.handle else None,
            )
            message = pb.FetchResponse(ready=ready)
        content = message.SerializeToString()
        packed += [_LENGTH.pack(len(content)), content]
    return b"".join(packed)


def _parse(packed: bytes) -> list[pb.FetchResponse]:
    messages, at = [], 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size + length
        messages.append(pb.FetchResponse.FromString(packed[at - length : at]))
    return messages


def _has_handle(message: pb.FetchResponse) -> bool:
    return message.ready.HasField("handle")


def _lent(message: pb.FetchResponse, source: FetchedRows | None, reading: ExitStack) -> Tensor:
    """Return shared rows in place. Closing `reading` checks that they were not replaced."""
    ready = message.ready
    if source is None:
        rows: Rows = SharedRows(Handle.from_message(ready.handle), ready.width, ready.dtype)
    else:
        rows = source.rows  # these also check that the Fetch call is still open
    return reading.enter_context(rows.lent()).tensor(ready.dtype)


def _broadcast(content: bytes | None, group: dist.ProcessGroup | None) -> bytes:
    """Return rank 0's bytes on every rank. The length is broadcast first."""
    length = torch.tensor([len(content or b"")])
    dist.broadcast(length, 0, group)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if content:
        buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(buffer, 0, group)
    return buffer.numpy().tobytes()


def _rows(message: pb.FetchResponse, source: FetchedRows | None, group: dist.ProcessGroup | None) -> Tensor:
    ready = message.ready
    array = (
        source.array
        if source is not None
        else np.empty((ready.row_end, ready.width), element_type(ready.dtype))
    )
    rows = tensor_view(array, ready.dtype)
    dist.broadcast(rows.view(torch.uint8), 0, group)
    return rows


@contextmanager
def _together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run the block on all ranks. No rank continues before all have finished; if one fails, all fail."""
    has_failed = True
    try:
        yield
        has_failed = False
    finally:  # also after an error, because the other ranks wait for this one
        failed = torch.tensor([has_failed], dtype=torch.int32)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group)
        if failed.item() and not has_failed:
            raise UnavailableError(_FAILED)
