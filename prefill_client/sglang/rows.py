"""Fetches the rows of the images in a prefill chunk. Never raises: an exception in a forward would end the engine."""

import logging
from collections.abc import Mapping, Sequence
from math import prod
from time import monotonic
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce

from encoder_contract.errors import (
    DeadlineError,
    InvalidImageError,
    ModelMismatchError,
    UnavailableError,
    UnknownImageError,
)
from prefill_client.blocking import BlockingClient
from prefill_client.images import FetchedRows, RowRequest
from prefill_client.plugin.service import connect_blocking
from prefill_client.sglang.counts import count
from prefill_client.sglang.image_name import SglangImageName, file_of
from prefill_client.sglang.sglang_settings import SglangSettings
from prefill_client.transport import BY_DEFAULT, TCP
from prefill_client.transport.rows import element_type

_log = logging.getLogger("sglang.encoder_service")

# How long chunks do not ask the service after it failed one, because each attempt would stall the engine.
PAUSE_S = 10.0
# The same if it has other weights. It says so at once, and may have these soon: a trainer updates one after the other.
OTHER_WEIGHTS_PAUSE_S = 1.0

Found = Tensor | InvalidImageError | None
"""The rows of an image, the error of an image that the service cannot decode, or None if the rows did not arrive."""


class ChunkRows:
    """Fetches rows for one rank. Not thread-safe: the rank's forward calls `fetch`."""

    def __init__(self, settings: SglangSettings) -> None:
        self._settings = settings
        self._client: BlockingClient | None = None
        self._fingerprint = b""
        self._not_before_s = 0.0
        self._said = ""  # why rows do not arrive

    def fetch(
        self, images: Sequence[tuple[SglangImageName, Any]], like: Tensor, fingerprint: bytes = b""
    ) -> list[Found]:
        """Return the rows [tokens, width] of each image, with the device and type of `like`.

        With `fingerprint`, only a service with this model fingerprint is asked.
        An image that the service cannot decode gets its error instead, and any other failure gets None. `images` has
        the name of each image and SGLang's item, which has the file.
        """
        rows: dict[int, Tensor | InvalidImageError] = {}
        if fingerprint != self._fingerprint:
            self._fingerprint, self._not_before_s = fingerprint, 0.0
            self._disconnect()
        if monotonic() >= self._not_before_s:
            try:
                self._fill(rows, images, like)
                self._said = ""
            except Exception as error:  # noqa: BLE001 - the engine would end
                if repr(error) != self._said:
                    _log.warning("rows of a prefill chunk did not arrive: %r", error)
                self._said = repr(error)
                has_others = isinstance(error, ModelMismatchError)
                self._not_before_s = monotonic() + (OTHER_WEIGHTS_PAUSE_S if has_others else PAUSE_S)
        return [rows.get(index) for index in range(len(images))]

    def _fill(
        self,
        rows: dict[int, Tensor | InvalidImageError],
        images: Sequence[tuple[SglangImageName, Any]],
        like: Tensor,
    ) -> None:
        deadline_s = monotonic() + self._settings.rows_timeout_s
        client = self._connected()
        names = {index: name for index, (name, _) in enumerate(images)}
        lost = self._fetch(client, names, rows, like, deadline_s)
        if lost:  # evicted since the scheduler accepted their request
            _log.info("%d images are encoded again", len(lost))
            again = [name.image(file_of(item)) for name, item in (images[index] for index in lost)]
            client.submit(again, timeout_s=_left_s(deadline_s))
            self._fetch(client, lost, rows, like, deadline_s)

    def _fetch(
        self,
        client: BlockingClient,
        names: Mapping[int, SglangImageName],
        rows: dict[int, Tensor | InvalidImageError],
        like: Tensor,
        deadline_s: float,
    ) -> dict[int, SglangImageName]:
        """Add the rows of these images to `rows`; return the images that the service does not know.

        Raises `EncoderError` if the service does not answer.
        """
        lost = {}
        with client.fetch(
            [RowRequest(name.digest, submitted_to=name.endpoint) for name in names.values()],
            grace_ms=0,
            transports=BY_DEFAULT if self._settings.shared_memory else [TCP],
            timeout_s=_left_s(deadline_s),
        ) as outcomes:
            for outcome in outcomes:
                index = [*names][outcome.index]
                if isinstance(outcome.error, UnknownImageError):
                    lost[index] = names[index]
                elif isinstance(outcome.error, UnavailableError | DeadlineError):
                    raise outcome.error
                elif isinstance(outcome.error, InvalidImageError):
                    rows[index] = outcome.error
                elif (wrong := _wrong(outcome, names[index])) is not None:
                    _log.warning("rows of an image are not used: %s", wrong)
                else:
                    rows[index] = outcomes.read([outcome], lambda lent: _copied(lent[0], like))
                    _count(outcome)
        return lost

    def _connected(self) -> BlockingClient:
        if self._client is None:
            timeout_s = self._settings.fetch_timeout_s
            self._client = connect_blocking(
                self._settings, wait=False, timeout_s=timeout_s, fingerprint=self._fingerprint
            )
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def agreed(here: Sequence[bool]) -> list[bool]:
    """Return for each image whether all ranks have it. They must agree, because a tower's layers work across ranks."""
    group = get_parallel().attn_tp_group
    if group.world_size == 1:
        return list(here)
    flags = torch.tensor(here, dtype=torch.int32)
    all_reduce(flags, ReduceOp.MIN, group=group.cpu_group)
    return [bool(flag) for flag in flags]


def counts_here() -> bool:
    """Return whether this rank updates the metrics. Only one does, because all ranks have the same rows."""
    return bool(get_parallel().attn_tp_rank == 0)


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - monotonic(), 0.001)


def _wrong(outcome: FetchedRows, name: SglangImageName) -> str | None:
    """Return why rows cannot be used, or None. The address covers the model, processor, element type and tenant."""
    if outcome.error is not None:
        return outcome.error.message
    if outcome.address != name.address:
        return "the service has another model now"
    if outcome.shape[0] != name.tokens:
        return f"the service sent {outcome.shape[0]} rows, but the prompt has {name.tokens} tokens for them"
    return None


def _copied(lent: FetchedRows, like: Tensor) -> Tensor:
    return lent.tensor().to(like.device, like.dtype, copy=True)


def _count(outcome: FetchedRows) -> None:
    if counts_here():
        count("images", outcome.source)
        count("row_bytes", outcome.transport, prod(outcome.shape) * element_type(outcome.dtype).itemsize)
