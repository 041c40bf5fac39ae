"""ResolveUrl and RecordUrl: one attempt each, at the server that a URL prefers."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from encoder_contract.errors import DeadlineError, UnavailableError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client.fleet.pool import Pool
from prefill_client.transport.row_stream import from_rpc

# What an answer may take beyond the time that the server was told to wait.
ANSWER_S = 2.0


class UrlCalls:
    """What clients of one tenant tell each other about image URLs. Whoever gets an error can do without."""

    def __init__(self, pool: Pool, caller: pb.Caller) -> None:
        self._pool = pool
        self._caller = caller

    @property
    def tenant_salt(self) -> bytes:
        """What keeps these records apart from others of the same tenant."""
        return self._caller.tenant_salt

    async def resolve(self, url_digest: bytes, *, wait_s: float, claim_s: float) -> pb.ResolveUrlResponse:
        """Ask what a URL holds; wait at most `wait_s` for who downloads it. Raises `EncoderError`."""
        request = pb.ResolveUrlRequest(
            caller=self._caller,
            url_digest=url_digest,
            wait_ms=round(wait_s * 1000),
            claim_ms=round(claim_s * 1000),
        )
        answer = await self._call(lambda stub: stub.ResolveUrl, request, wait_s + ANSWER_S)
        assert isinstance(answer, pb.ResolveUrlResponse)
        return answer

    async def record(self, said: pb.RecordUrlRequest) -> None:
        """Say what came of a download; the caller is filled in. Raises `EncoderError`."""
        said.caller.CopyFrom(self._caller)
        await self._call(lambda stub: stub.RecordUrl, said, ANSWER_S)

    async def _call(
        self,
        method: Callable[[Any], Callable[..., Any]],
        request: pb.ResolveUrlRequest | pb.RecordUrlRequest,
        timeout_s: float,
    ) -> Any:
        order = self._pool.router.order(request.url_digest)
        if not order:
            raise UnavailableError("no encoder endpoint is known")
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._pool.connection(order[0])
                return await method(EncoderServiceStub(connection.channel))(
                    request, metadata=connection.metadata()
                )
        except TimeoutError as error:
            raise DeadlineError(f"{order[0]} did not answer within {timeout_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, order[0]) from error
