"""Checks the end of a call: no input may end in a status or error that blames the server."""

from collections.abc import Sequence
from typing import Any

import grpc

from encoder_contract.v1 import encoder_pb2 as pb

SERVICE = "/encoder_contract.v1.EncoderService"
BLAMING = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})
INTERNAL = grpc.StatusCode.INTERNAL.value[0]
# This error blames neither side: bytes may change on the way.
DAMAGED = "the rows arrived damaged"


async def check(call: Any, errors: Sequence[pb.ImageError]) -> None:
    """Raise `AssertionError` for a status, or an image's error, that blames the server."""
    status, details = await call.code(), await call.details()
    of_client = details == "Internal error from Core"  # gRPC's own client, for a write after the end
    assert status not in BLAMING or of_client, f"the call ended with {status.name}: {details}"
    for error in errors:
        blames = error.code == INTERNAL and not error.message.startswith(DAMAGED)
        assert not blames, f"an image's error is {error.message}"
