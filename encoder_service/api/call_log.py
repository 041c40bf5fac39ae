"""The record of a call: metrics while it runs, and one log line when it ends."""

import logging
from collections import Counter
from collections.abc import Mapping
from time import monotonic
from typing import Literal, TypeAlias

from encoder_contract.errors import EncoderError, Status
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.limits import Caller
from encoder_service.metrics import Metrics, reason

log = logging.getLogger(__name__)

MAX_NAME = 128  # characters: what the contract allows


CallKind: TypeAlias = Literal["submit", "fetch", "put"]


class Call:
    """One Submit, Fetch or Put. Always `close` it."""

    def __init__(self, metrics: Metrics, kind: CallKind, caller: Caller) -> None:
        """Begin the record of a call of `caller`, before its first message."""
        self._metrics = metrics
        self._kind = kind
        self._began = monotonic()
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._stage_ms: dict[str, float] = {}
        self._bytes = 0
        # Not the error: its traceback refers to the frames of the call, and they to this.
        self._status, self._why = "", ""
        self._proxy_request_id = caller.proxy_request_id
        self._trace = {"trace": caller.trace_id} if caller.trace_id else {}
        self.made_by("", caller.host)
        # Every image has its outcome: if the caller disconnects now, that is no failure.
        self.complete = False
        metrics.call_began(kind)

    def made_by(self, request_id: str, client_id: str) -> None:
        """Note the caller's identifiers, truncated to fit a line: they are not validated yet."""
        request_id = request_id or self._proxy_request_id
        self._made_by = {"request": request_id[:MAX_NAME], "client": client_id[:MAX_NAME]}

    def submitted(
        self, outcome: Literal["cached", "queued", "failed"], error: EncoderError | None = None
    ) -> None:
        """Note the answer to an image of a Submit."""
        self._note(outcome, error)
        self._metrics.submitted(outcome, error)

    def uploaded(self, size: int, seconds: float) -> None:
        """Note an image whose last byte arrived `seconds` after it was named."""
        self._bytes += size
        self._metrics.uploaded(size, seconds)

    def fetched(
        self,
        outcome: Literal["device", "host", "peer", "encoded", "failed"],
        wait_s: float,
        stage_ms: Mapping[str, float],
        error: EncoderError | None = None,
    ) -> None:
        """Note an image of a Fetch: where its rows came from, and how long the caller waited."""
        self._note(outcome, error)
        for stage, ms in {**stage_ms, "wait": wait_s * 1000}.items():
            self._stage_ms[stage] = max(ms, self._stage_ms.get(stage, 0.0))
        self._metrics.fetched(outcome, wait_s, error)

    def put(
        self,
        outcome: Literal["held", "yours", "wait", "kept", "failed"],
        size: int = 0,
        error: EncoderError | None = None,
    ) -> None:
        """Note an answer of a Put, and the size of rows that were kept."""
        self._note(outcome, error)
        self._bytes += size
        self._metrics.put(outcome, size, error)

    def transferred(self, transport: pb.Transport.ValueType, size: int, seconds: float) -> None:
        """Note rows sent."""
        self._bytes += size
        self._metrics.transferred(transport, size, seconds)

    def failed(self, error: EncoderError) -> None:
        """Note that the call as a whole failed."""
        self._status, self._why = error.status.name, error.message

    def close(self) -> None:
        """Count the call and write its log line: stage times are those of its slowest image."""
        name = self._status or ("OK" if self.complete else Status.CANCELLED.name)
        self._metrics.call_ended(self._kind, name)
        fields: dict[str, object] = {**self._made_by, **self._trace, "status": name}
        fields |= {"images": self._outcomes.total(), **self._outcomes, **self._reasons}
        if self._bytes:
            fields["bytes"] = self._bytes
        fields["ms"] = round((monotonic() - self._began) * 1000, 1)
        fields |= {f"{stage}_ms": round(ms, 1) for stage, ms in self._stage_ms.items()}
        if self._status:
            fields["error"] = self._why
        log.info(self._kind, extra={"fields": fields})

    def _note(self, outcome: str, error: EncoderError | None) -> None:
        self._outcomes[outcome] += 1
        if error is not None:
            self._reasons[reason(error)] += 1
