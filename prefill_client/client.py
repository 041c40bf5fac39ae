"""The client of an LLM server: submits images and fetches their rows; it routes, retries and fails over by itself."""

import asyncio
from collections.abc import Sequence
from typing import Self
from uuid import uuid4

from encoder_contract.credentials import NO_CREDENTIALS, Credentials
from encoder_contract.errors import (
    InvalidRequestError,
)
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.put_session import PutSession
from prefill_client.fleet.submission import KeptImages, SentImages, Submission
from prefill_client.images import Image, RowRequest, Submitted, read_images
from prefill_client.transport import BY_DEFAULT, SHM, TRANSPORTS
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import Description

DEFAULT_GRACE_MS = 10_000  # a Submit of another process may be this far behind its Fetch
DEFAULT_TIMEOUT_S = 120.0  # nobody waits longer for a first token


class EncoderClient:
    """Asynchronous client of a server or a fleet; make one with `await EncoderClient.connect(...)` and share it."""

    def __init__(self, pool: Pool, *, client_id: str, tenant_salt: bytes) -> None:
        self.description: Description = pool.description
        self._pool = pool
        self._recent = SentImages()
        self._client_id = client_id
        self._tenant_salt = tenant_salt

    @classmethod
    async def connect(
        cls,
        endpoints: str | Sequence[str],
        *,
        model_fingerprint: bytes = b"",
        processor_fingerprint: bytes = b"",
        client_id: str = "",
        tenant_salt: bytes = b"",
        credentials: Credentials = NO_CREDENTIALS,
        timeout_s: float = 10.0,
        wait: bool = True,
    ) -> Self:
        """Connect to one server or several of one model; one that answers is enough.

        An endpoint is host:port, unix:/path, or dns:host:port for every address that the name has. Raises
        `ModelMismatchError` when a given fingerprint is not the server's, and `UnavailableError` when none can be
        reached within `timeout_s`. A server that is starting refuses connections until it has read its weights, and a
        name may have no address before that: both are tried again, unless `wait` is False. Raises `ValueError` for
        credentials that cannot be used.
        """
        pool = Pool(
            [endpoints] if isinstance(endpoints, str) else endpoints,
            model=model_fingerprint,
            processor=processor_fingerprint,
            channels=Channels(credentials),
            connect_timeout_s=timeout_s,
            wait=wait,
        )
        try:
            await pool.open()
        except BaseException:  # cancelled too: nobody else knows of its connections
            await pool.close()
            raise
        return cls(pool, client_id=client_id, tenant_salt=tenant_salt)

    def for_tenant(self, tenant_salt: bytes) -> Self:
        """Return a client of another tenant over the same connections: close this one, not those made of it."""
        if tenant_salt == self._tenant_salt:
            return self
        return type(self)(self._pool, client_id=self._client_id, tenant_salt=tenant_salt)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; running calls end."""
        await self._pool.close()

    async def submit(
        self,
        files: Sequence[bytes | Image],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Submitted]:
        """Submit image files; return, in order, the confirmed grid and token count of each, or its error.

        A file that is not an image fails here, alone, before any server is asked; an `Image` was read already. Bytes
        are sent only for images that the server does not know. Errors that a retry may cure are retried, at another
        server if need be, until `timeout_s`.
        """
        read = await asyncio.to_thread(read_images, files, self.description.geometry)
        submission = Submission(self._pool, self._recent, self._caller(request_id, priority))
        return await submission.submit(read, timeout_s)

    async def keep(
        self,
        files: Sequence[bytes | Image],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        again_s: float = DEFAULT_TIMEOUT_S,
    ) -> KeptImages:
        """Submit image files as `submit` does, and keep them submitted until the answer is closed, wherever they are.

        A server that has lost one is sent it again. If a server goes, its images are submitted to another, for as long
        as `again_s`. Whoever fetches them says that they are `kept`.
        """
        read = await asyncio.to_thread(read_images, files, self.description.geometry)
        kept = KeptImages(self._pool, self._recent, self._caller(request_id, priority), again_s)
        try:
            kept.answers = await kept.submit(read, timeout_s)
        except BaseException:
            await kept.close()
            raise
        return kept

    def fetch(
        self,
        requests: Sequence[RowRequest],
        *,
        request_id: str = "",
        priority: int = 0,
        grace_ms: int = DEFAULT_GRACE_MS,
        transports: Sequence[str] = BY_DEFAULT,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        producer: Producer | None = None,
        kept: bool = False,
    ) -> FetchStream:
        """Ask for rows; iterate the stream for one outcome per request, in the order of readiness.

        `transports` lists the transports to use, best first; inline is the fallback in any case. "device" is for
        callers that compute on a GPU. Use the stream with `async with`: rows that stay at the server are held until it
        ends, however long after `timeout_s`, which bounds the wait for outcomes. An image that this client submitted
        and a server has lost is submitted again by itself. With a `producer`, the rows are those that it put. With
        `kept`, somebody keeps the images submitted (see `keep`): one server after the other is asked for them until
        `timeout_s`. Raises `InvalidRequestError` for an unknown transport.
        """
        if unknown := {*transports} - {*TRANSPORTS}:
            raise InvalidRequestError(
                f"transports are {', '.join(TRANSPORTS)}; not {', '.join(sorted(unknown))}"
            )
        return FetchStream(
            self._pool,
            self._recent,
            requests,
            self._caller(request_id, priority),
            grace_ms=grace_ms,
            transports=transports,
            timeout_s=timeout_s,
            producer=producer,
            kept=kept,
        )

    def put(
        self,
        producer: Producer,
        *,
        request_id: str = "",
        transports: Sequence[str] = BY_DEFAULT,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutSession:
        """Put rows that `producer` computes, at servers that accept Put; one session serves for many images.

        `transports` lists the transports to use; inline is always possible. `timeout_s` bounds each step.
        """
        caller = self._caller(request_id, 0)
        return PutSession(self._pool, producer, caller, shared=SHM in transports, timeout_s=timeout_s)

    def _caller(self, request_id: str, priority: int) -> pb.Caller:
        return pb.Caller(
            request_id=request_id or uuid4().hex,
            priority=priority,
            model_fingerprint=self.description.model_fingerprint,
            processor_fingerprint=self.description.processor_fingerprint,
            tenant_salt=self._tenant_salt,
            client_id=self._client_id,
        )
