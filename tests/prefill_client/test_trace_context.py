"""The trace context of a caller of vLLM: only a well-formed one is passed to the encoder service."""

import pytest

from encoder_contract.traceparent import trace_id
from prefill_client.vllm.image_name import RequestInfo, valid_traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GOOD = f"00-{TRACE}-00f067aa0ba902b7-01"
# gRPC ends a call with the first, and most servers one with the second: metadata is ASCII, and bounded.
BAD = ["é", "a" * 10_000, GOOD + "é", GOOD.replace(TRACE, "0" * 32), GOOD.upper(), GOOD + "\nforged", ""]
CASES = [(GOOD, GOOD), *((bad, "") for bad in BAD), (7, ""), (None, "")]


@pytest.mark.parametrize(("sent", "kept"), CASES, ids=lambda text: str(text)[:60])
def test_a_malformed_trace_context_is_ignored(sent: object, kept: str) -> None:
    assert valid_traceparent(sent) == kept
    parameters = {RequestInfo.KEY: {"traceparent": sent}}
    assert RequestInfo.read(parameters, "x").traceparent == kept
    assert trace_id(str(sent)) == (TRACE if kept else "")


def test_a_request_without_a_trace_context_has_none() -> None:
    assert RequestInfo.read(None, "x").traceparent == ""
