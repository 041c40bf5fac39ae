"""Client library of the encoder service, for LLM servers. docs/prefill.md shows how to use it.

Importing it loads neither gRPC nor torch: gRPC is imported with the first client, torch with the first tensor.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from encoder_contract.credentials import Credentials
from encoder_contract.digest import content_digest
from encoder_contract.errors import (
    AbandonedError,
    DeadlineError,
    DigestMismatchError,
    EncoderError,
    ForbiddenError,
    ImageLimitError,
    InternalError,
    InvalidImageError,
    InvalidRequestError,
    LostImageError,
    ModelMismatchError,
    OverloadedError,
    StaleHandleError,
    UnauthenticatedError,
    UnavailableError,
    UndecodableImageError,
    UnknownImageError,
)
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.handle import Handle
from encoder_contract.version import __version__
from encoder_contract.video import VideoSettings
from prefill_client.images import (
    FetchedRows,
    Image,
    RowRequest,
    Submitted,
    read,
    read_images,
)
from prefill_client.prefetch import PrefetchSession, ReadyChunk
from prefill_client.prompt import Chunk, Layout, Span, Window, expand_prompt, plan
from prefill_client.trace import Trace
from prefill_client.transport import TRANSPORTS
from prefill_client.transport.device import DeviceRows
from prefill_client.transport.shared_memory import SharedRows

# gRPC's own handlers of a fork are skipped while a client waits, but only in part: they crash the forked process, even
# if it makes no calls. gRPC reads this when it is imported. `forks.py` refuses calls in such a process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

if TYPE_CHECKING:
    from prefill_client.blocking import BlockingClient, BlockingFetch, BlockingKept
    from prefill_client.client import EncoderClient
    from prefill_client.fleet.fetch_stream import FetchStream
    from prefill_client.fleet.submission import KeptImages
    from prefill_client.transport.connection import Description, traceparent
    from prefill_client.video import Video, VideoTokens, mark_pairs, read_videos
else:
    # These need gRPC. Import them on first use: a process that only plans, or reads rows by handle, needs no gRPC.
    _WITH_GRPC = {
        "BlockingClient": "prefill_client.blocking",
        "BlockingFetch": "prefill_client.blocking",
        "BlockingKept": "prefill_client.blocking",
        "Description": "prefill_client.transport.connection",
        "EncoderClient": "prefill_client.client",
        "FetchStream": "prefill_client.fleet.fetch_stream",
        "KeptImages": "prefill_client.fleet.submission",
        "Video": "prefill_client.video",
        "VideoTokens": "prefill_client.video",
        "mark_pairs": "prefill_client.video",
        "read_videos": "prefill_client.video",
        "traceparent": "prefill_client.transport.connection",
    }

    def __getattr__(name: str) -> Any:
        if name not in _WITH_GRPC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_WITH_GRPC[name]), name)


__all__ = [
    "TRANSPORTS",
    "AbandonedError",
    "BlockingClient",
    "BlockingFetch",
    "BlockingKept",
    "Chunk",
    "Credentials",
    "DeadlineError",
    "Description",
    "DeviceRows",
    "DigestMismatchError",
    "EncoderClient",
    "EncoderError",
    "FetchStream",
    "FetchedRows",
    "ForbiddenError",
    "Geometry",
    "Grid",
    "Handle",
    "Image",
    "ImageLimitError",
    "InternalError",
    "InvalidImageError",
    "InvalidRequestError",
    "KeptImages",
    "Layout",
    "LostImageError",
    "ModelMismatchError",
    "OverloadedError",
    "PrefetchSession",
    "ReadyChunk",
    "RowRequest",
    "SharedRows",
    "Span",
    "StaleHandleError",
    "Submitted",
    "Trace",
    "UnauthenticatedError",
    "UnavailableError",
    "UndecodableImageError",
    "UnknownImageError",
    "Video",
    "VideoSettings",
    "VideoTokens",
    "Window",
    "__version__",
    "content_digest",
    "expand_prompt",
    "mark_pairs",
    "plan",
    "read",
    "read_images",
    "read_videos",
    "traceparent",
]
