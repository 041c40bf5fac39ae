"""OpenTelemetry spans: client, server, stages and peer under the caller's trace, and none without a sampled one."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from encoder_contract import spans
from encoder_contract.spans import CallSpan, SpanName
from encoder_contract.traceparent import is_sampled
from prefill_client import EncoderClient, RowRequest, Submitted, content_digest, traceparent
from testing.collector import collecting
from testing.photos import photo
from testing.server_process import running
from tests.cluster_replica import Start
from tests.waiting import PATIENCE_S, soon

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


@pytest.fixture(scope="module")
def exporter() -> object:
    """All spans of this process that have ended."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory


@pytest.fixture
def ended(exporter) -> Iterator[object]:
    exporter.clear()
    yield exporter.get_finished_spans
    exporter.clear()


@contextmanager
def traced(context: str) -> Iterator[None]:
    """Make calls of this trace."""
    token = traceparent.set(context)
    try:
        yield
    finally:
        traceparent.reset(token)


def named(ended, name: str) -> list:
    return [span for span in ended() if span.name == name]


async def test_client_server_stages_and_peer_form_one_trace(start: Start, ended) -> None:
    a, b = await start(), await start()
    with traced(SAMPLED):
        (image,) = await a.client.submit([photo(300, 280, 4242)])
        await a.fetch(image.digest)
        await soon(lambda: b.locates(image.digest))
        assert (await b.fetch(image.digest)).source == "peer"
    await soon(
        lambda: len(named(ended, "encoder.fetch")) == 3 and len(named(ended, "encoder.client.fetch")) == 2
    )
    for name in ("encoder.submit", "encoder.client.submit", "encoder.peer_fetch"):
        await soon(lambda name=name: len(named(ended, name)) == 1)
    by_id = {span.context.span_id: span for span in ended()}
    assert {f"{span.context.trace_id:032x}" for span in ended()} == {TRACE}

    def parents(name: str) -> set[str]:
        found = [by_id.get(span.parent.span_id) for span in named(ended, name)]
        return {span.name if span is not None else "caller" for span in found}

    assert parents("encoder.client.submit") == parents("encoder.client.fetch") == {"caller"}
    assert {f"{span.parent.span_id:016x}" for span in named(ended, "encoder.client.fetch")} == {CALLER}
    assert parents("encoder.submit") == {"encoder.client.submit"}
    assert parents("encoder.peer_fetch") == {"encoder.fetch"}
    assert parents("encoder.fetch") == {"encoder.client.fetch", "encoder.peer_fetch"}
    for stage in spans.STAGES.values():
        (span,) = named(ended, stage)
        assert parents(stage) == {"encoder.fetch"}
        assert span.start_time <= span.end_time
    (decode,), (vit,) = named(ended, "encoder.decode"), named(ended, "encoder.vit")
    assert decode.start_time < vit.start_time
    fetch = by_id[vit.parent.span_id]
    assert abs(vit.end_time - fetch.end_time) < 60e9, "on the clock of all other spans"
    assert fetch.attributes["rpc.grpc.status"] == "OK"
    assert fetch.attributes["encoder.images.encoded"] == 1


def test_images_that_shared_a_stage_share_its_span(ended) -> None:
    call = CallSpan.begin(SpanName.FETCH, SAMPLED)
    assert call is not None
    for decode_s in (1.0, 2.0):
        call.stages({"decode": decode_s, "vit": 3.0, "other": 4.0}, {"decode": 7.0, "vit": 500.0})
    call.end()
    found = [(span.name, span.attributes.get("encoder.images")) for span in ended()]
    decode, vit, fetch = ("encoder.decode", None), ("encoder.vit", 2), ("encoder.fetch", None)
    assert found == [decode, vit, decode, fetch]
    lasted_ns = [span.end_time - span.start_time for span in ended()[:3]]
    assert lasted_ns == [7_000_000, 500_000_000, 7_000_000]


def test_stages_of_a_call_with_many_images_do_not_wait_for_its_end(ended) -> None:
    call = CallSpan.begin(SpanName.FETCH, SAMPLED)
    assert call is not None
    for image in range(1000):
        call.stages({"decode": float(image), "vit": 10_000.0 + image // 16}, {})
    assert len(ended()) > 900
    call.end()
    towers = [span for span in ended() if span.name == SpanName.VIT]
    assert [span.attributes.get("encoder.images") for span in towers] == [16] * 62 + [8]
    assert len(named(ended, SpanName.DECODE)) == 1000


async def test_an_image_with_several_windows_has_its_stages_once(start: Start, ended) -> None:
    a = await start()
    with traced(SAMPLED):
        (image,) = await a.client.submit([photo(300, 280, 4244)])
        windows = [RowRequest(image.digest, 0, 5), RowRequest(image.digest, 5, 10)]
        async with a.client.fetch(windows, timeout_s=PATIENCE_S) as outcomes:
            assert [outcome.error async for outcome in outcomes] == [None, None]
    await soon(lambda: len(named(ended, "encoder.fetch")) == 1)
    for stage in spans.STAGES.values():
        (span,) = named(ended, stage)
        assert span.attributes.get("encoder.images") is None


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "10"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")]
)
def test_a_mistake_in_a_variable_of_opentelemetry_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    spans.export("encoder-service", "a1b2", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == spans.__name__]
    assert line.startswith("spans are not exported: ")


async def test_a_collector_gets_one_trace_of_a_request_over_two_replicas(
    checkpoint: Path, redis_url: str, ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rotel", reason="the collector is not packaged for this machine")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    settings = {"index": redis_url, "index_prefix": "collected", "index_timeout_ms": 2000, "threads": 1}
    with collecting() as collector, ExitStack() as stack:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        a, b = (stack.enter_context(running(checkpoint, **settings)) for _ in range(2))
        async with (
            await EncoderClient.connect(a.endpoint) as client_a,
            await EncoderClient.connect(b.endpoint) as client_b,
        ):
            trace = await request_with_peer(client_a, client_b)
            replica_of = {client_a.description.replica_id: "a", client_b.description.replica_id: "b"}
        expected = {
            ("b", SpanName.SUBMIT, SpanName.CLIENT_SUBMIT),
            ("b", SpanName.FETCH, SpanName.CLIENT_FETCH),
            ("b", SpanName.PEER_FETCH, SpanName.FETCH),
            ("a", SpanName.FETCH, SpanName.PEER_FETCH),
            *(("b", stage, SpanName.FETCH) for stage in spans.STAGES.values()),
        }

        def tree() -> set[tuple[str, str, str]]:
            received = [span for span in collector.spans() if span.trace_id == trace]
            names = {f"{span.context.span_id:016x}": span.name for span in ended()}
            names |= {span.span_id: span.name for span in received}
            return {
                (replica_of[span.resource["service.instance.id"]], span.name, names.get(span.parent_id, "?"))
                for span in received
            }

        await soon(lambda: tree() == expected)
        assert all(span.began_ns <= span.ended_ns for span in collector.spans())
        assert {span.resource["service.name"] for span in collector.spans()} == {"encoder-service"}


async def request_with_peer(client_a: EncoderClient, client_b: EncoderClient) -> str:
    """Ask replica b for a new image and one that a has; return the trace. A stall costs an attempt."""
    for attempt in itertools.count():
        known, later, new = (photo(300, 280, 3 * attempt + number) for number in range(3))
        for file in (known, later):
            await rows_of(client_a, await client_a.submit([file]))
        # Once b finds the later image, it finds the earlier one, too.
        await until_found(client_b, content_digest(later))
        trace = f"{attempt + 1:032x}"
        with traced(f"00-{trace}-{CALLER}-01"):
            if await rows_of(client_b, await client_b.submit([known, new])) == ["peer", "encoded"]:
                return trace
    raise AssertionError


async def rows_of(client: EncoderClient, submitted: Sequence[Submitted]) -> list[str]:
    """Fetch the rows of submitted images, and return where the server found them."""
    requests = [RowRequest(image.digest) for image in submitted]
    async with client.fetch(requests, timeout_s=PATIENCE_S) as outcomes:
        found = {outcome.index: outcome.source async for outcome in outcomes}
    return [found[index] for index in range(len(requests))]


async def until_found(client: EncoderClient, digest: bytes) -> None:
    """Wait until the client's replica finds the rows of an image at another one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with client.fetch([RowRequest(digest)], timeout_s=PATIENCE_S) as outcomes:
                if (await anext(aiter(outcomes))).error is None:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("context", [UNSAMPLED, "", "rubbish", f"00-{'0' * 32}-{CALLER}-01", SAMPLED + "-x"])
async def test_nothing_of_opentelemetry_is_called_for_other_requests(
    start: Start, ended, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    def called() -> None:
        raise AssertionError("OpenTelemetry was called")

    monkeypatch.setattr(spans, "_opentelemetry", called)
    assert not is_sampled(context)
    a = await start()
    with traced(context):
        (image,) = await a.client.submit([photo(300, 280, 4243)])
        await a.fetch(image.digest)
    assert ended() == ()


def test_opentelemetry_is_imported_for_sampled_calls_only() -> None:
    code = (
        "import sys\n"
        "from encoder_contract.spans import CallSpan, SpanName\n"
        "import prefill_client, prefill_client.client, encoder_service.api.service\n"
        f"for context in ({UNSAMPLED!r}, {SAMPLED!r}):\n"
        "    span = CallSpan.begin(SpanName.FETCH, context)\n"
        "    print(span, any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.PIPE)
    assert done.stdout.split() == [b"None", b"False", b"None", b"True"], "this process exports no spans"


def test_without_the_package_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_opentelemetry", lambda: None)
    assert CallSpan.begin(SpanName.FETCH, SAMPLED) is None


def test_a_server_without_the_extra_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spans.export("encoder-service", "a1b2", {})
    assert caplog.records == []
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    spans.export("encoder-service", "a1b2", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    (record,) = caplog.records
    assert "pip install 'encoder-service[otel]'" in record.getMessage()
