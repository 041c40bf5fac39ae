"""OpenTelemetry spans of calls, at clients and servers. They exist only if the caller's `traceparent` is sampled.

`SpanName` lists all spans. The span of a call begins with the call, because the calls that it causes carry its id. The
spans of an image's stages are made after the fact, from the times that servers record anyway. Without a sampled
`traceparent` nothing of OpenTelemetry is called, or even imported. Needs the extra `otel`.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from time import monotonic, time_ns
from typing import Any, Self

from encoder_contract.direct import NO_PROXY, is_local_url
from encoder_contract.traceparent import is_sampled

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""A server exports its spans if one of these environment variables is set. OpenTelemetry reads them."""

current: ContextVar[str] = ContextVar("span", default="")
"""The `traceparent` of the span that this task works for, which calls to other servers carry. Empty: none."""


class SpanName(StrEnum):
    """All spans, and whose they are."""

    CLIENT_SUBMIT = "encoder.client.submit"  # an attempt of a client at one server
    CLIENT_FETCH = "encoder.client.fetch"
    SUBMIT = "encoder.submit"  # a call at the server
    FETCH = "encoder.fetch"
    PEER_FETCH = "encoder.peer_fetch"  # a replica's Fetch from another one
    QUEUE = "encoder.queue"  # stages of an image that was encoded for the call, at the server
    DECODE = "encoder.decode"
    PREPROCESS = "encoder.preprocess"
    VIT = "encoder.vit"
    COPY_OUT = "encoder.copy_out"


STAGES = {
    name.removeprefix("encoder."): name
    for name in (SpanName.QUEUE, SpanName.DECODE, SpanName.PREPROCESS, SpanName.VIT, SpanName.COPY_OUT)
}
# Spans of stages are made in small pieces, so that a call of many images does not occupy the event loop when it ends.
# Images of one batch arrive together, so those that shared a stage are nearly always among the last ones.
_WAITING_STAGES = 128
_CALLERS = (SpanName.CLIENT_SUBMIT, SpanName.CLIENT_FETCH, SpanName.PEER_FETCH)


class CallSpan:
    """The span of a running call. Always `end` it."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._stages: Counter[tuple[SpanName, float, float]] = Counter()

    @classmethod
    def begin(cls, name: SpanName, traceparent: str, **attributes: str | int) -> Self | None:
        """Begin a span under `traceparent`.

        Returns None if that is not sampled, if OpenTelemetry is not installed, or if its settings drop the span.
        """
        if not is_sampled(traceparent) or (trace := _opentelemetry()) is None:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")
        caller = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
        )
        parent = trace.set_span_in_context(trace.NonRecordingSpan(caller))
        kind = trace.SpanKind.CLIENT if name in _CALLERS else trace.SpanKind.SERVER
        span = _tracer(trace.get_tracer_provider()).start_span(name, parent, kind, attributes)
        return cls(span) if span.is_recording() else None

    @property
    def traceparent(self) -> str:
        """The `traceparent` of calls that belong to this span."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def stages(self, began_s: Mapping[str, float], stage_ms: Mapping[str, float]) -> None:
        """Add the stages of an image, from when each began (`time.monotonic`) and how long it took.

        Images that were in a stage together, as a batch is in the tower, have one span.
        """
        for stage, begin_s in began_s.items():
            if (name := STAGES.get(stage)) is not None:
                self._stages[name, begin_s, stage_ms.get(stage, 0.0)] += 1
        self._end_stages(_WAITING_STAGES)

    def end(self, status: str = "OK", **attributes: str | int) -> None:
        """End the span with the call's gRPC status."""
        self._end_stages(0)
        self._span.set_attributes({"rpc.grpc.status": status, **attributes})
        self._span.end()

    def _end_stages(self, waiting: int) -> None:
        """Make spans of the oldest stages until so many wait."""
        if len(self._stages) <= waiting:
            return
        trace = _opentelemetry()
        assert trace is not None, "this span exists"
        here, now_ns, now_s = trace.set_span_in_context(self._span), time_ns(), monotonic()
        tracer = _tracer(trace.get_tracer_provider())
        while len(self._stages) > waiting:
            name, begin_s, lasted_ms = stage = next(iter(self._stages))
            images = self._stages.pop(stage)
            begin_ns = now_ns - round((now_s - begin_s) * 1e9)
            # An attribute costs a fifth of a span.
            together = {"encoder.images": images} if images > 1 else None
            span = tracer.start_span(name, here, attributes=together, start_time=begin_ns)
            span.end(begin_ns + round(lasted_ms * 1e6))


def export(service: str, instance: str, environment: Mapping[str, str]) -> None:
    """Export the spans of this process as the environment says (`ENDPOINTS`); otherwise do nothing.

    `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence over `service` and `instance`.
    """
    if not any(map(environment.get, ENDPOINTS)):
        return
    try:
        _export(service, instance, environment)
    except ImportError:
        log.warning(
            "%s is set, but spans need the extra otel: pip install 'encoder-service[otel]'", ENDPOINTS[0]
        )
    except Exception as error:  # noqa: BLE001 - a mistake in one of OpenTelemetry's many variables
        log.warning("spans are not exported: %s", error)


def _export(service: str, instance: str, environment: Mapping[str, str]) -> None:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import (
        SERVICE_INSTANCE_ID,
        SERVICE_NAME,
        OTELResourceDetector,
        Resource,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    collector = next(url for name in reversed(ENDPOINTS) if (url := environment.get(name)))
    options = NO_PROXY if is_local_url(collector) else ()
    ours = Resource.create({SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(channel_options=options)))
    trace.set_tracer_provider(provider)


@cache
def _opentelemetry() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


@cache
def _tracer(provider: Any) -> Any:
    return provider.get_tracer("encoder")
