"""What the middleware tells the connector of a request, in its `ec_transfer_params`: who calls, and what is stored.

Any client may write there: what is read is made harmless, and decides about waiting only.
"""

from collections.abc import Mapping
from typing import Any

from encoder_contract.traceparent import trace_id
from prefill_client.vllm.row_fetcher import Caller

PARAMETERS = "encoder_service"
"""The key under which it stands."""
STORED = "stored"
"""Below it: the indexes of the images that the service had encoded when they were submitted."""

SUBMITTED_TO = "submitted_to"
"""Below it: the server to which each image was submitted."""


def caller_of(parameters: Mapping[str, Any] | None, *, request_id: str, tenant_salt: str) -> Caller:
    """Return who calls; `request_id` is vLLM's, for a request that the middleware has not seen."""
    said = _said(parameters)
    priority = said.get("priority", 0)
    return Caller(
        request_id=str(said.get("request_id", request_id))[:128],
        priority=priority if priority in range(-8, 9) else 0,
        traceparent=trace_context(said.get("traceparent")),
        tenant_salt=tenant_salt,
    )


def trace_context(said: object) -> str:
    """Return a well-formed `traceparent`, else nothing: as metadata of a call gRPC would fail it for any other."""
    return said if isinstance(said, str) and trace_id(said) else ""


def stored_of(parameters: Mapping[str, Any] | None) -> set[int]:
    """Return the images that the service had when the middleware submitted them."""
    stored = _said(parameters).get(STORED)
    return {index for index in stored if isinstance(index, int)} if isinstance(stored, list) else set()


def submitted_to_of(parameters: Mapping[str, Any] | None) -> list[str]:
    """Return the server to which each image was submitted; it is asked only if the connector knows it."""
    servers = _said(parameters).get(SUBMITTED_TO)
    return [str(server) for server in servers] if isinstance(servers, list) else []


def _said(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    said = (parameters or {}).get(PARAMETERS)
    return said if isinstance(said, Mapping) else {}
