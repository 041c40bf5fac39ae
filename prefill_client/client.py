"""The client of an LLM server: submits images and fetches their rows; it routes, retries and fails over by itself."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Self
from uuid import uuid4

from encoder_contract.credentials import NO_CREDENTIALS, Credentials
from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InvalidRequestError,
    UnavailableError,
)
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.fleet.kept_images import KeptImages, SentImages
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.put_session import PutSession
from prefill_client.fleet.retries import Attempts
from prefill_client.images import Image, RowRequest, Submitted, read_images
from prefill_client.transport import BY_DEFAULT, SHM, TRANSPORTS
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import Description

DEFAULT_GRACE_MS = 10_000  # a Submit of another process may be this far behind its Fetch
DEFAULT_TIMEOUT_S = 120.0  # nobody waits longer for a first token


class EncoderClient:
    """Asynchronous client of a server or a fleet; make one with `await EncoderClient.connect(...)` and share it."""

    def __init__(self, pool: Pool, description: Description, *, client_id: str, tenant_salt: bytes) -> None:
        self.description = description
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
            description = await pool.open()
        except BaseException:  # cancelled too: nobody else knows of its connections
            await pool.close()
            raise
        return cls(pool, description, client_id=client_id, tenant_salt=tenant_salt)

    def for_tenant(self, tenant_salt: bytes) -> Self:
        """Return a client of another tenant over the same connections: close this one, not those made of it."""
        if tenant_salt == self._tenant_salt:
            return self
        return type(self)(self._pool, self.description, client_id=self._client_id, tenant_salt=tenant_salt)

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
        return await self._submit(read, self._caller(request_id, priority), timeout_s)

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
        caller = self._caller(request_id, priority)

        async def submit(images: Sequence[Image]) -> list[Submitted]:
            return await self._submit(images, caller, again_s, kept=kept, persistent=True)

        kept = KeptImages(submit, failed=self._pool.router.failed)
        try:
            kept.answers = await self._submit(read, caller, timeout_s, kept=kept)
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
        caller = self._caller(request_id, priority)

        def submit(images: Sequence[Image], left_s: float) -> Awaitable[list[Submitted]]:
            return self.submit(images, request_id=caller.request_id, priority=priority, timeout_s=left_s)

        return FetchStream(
            self._pool,
            self._recent,
            requests,
            caller,
            submit=submit,
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

    async def _submit(
        self,
        read: Sequence[Image | EncoderError],
        caller: pb.Caller,
        timeout_s: float,
        *,
        kept: KeptImages | None = None,
        persistent: bool = False,
    ) -> list[Submitted]:
        """Return the answers to images, in order; one that could not be read has its error already."""
        images = {index: image for index, image in enumerate(read) if isinstance(image, Image)}
        answers = {
            index: Submitted(b"", error=error)
            for index, error in enumerate(read)
            if isinstance(error, EncoderError)
        }
        deadline = monotonic() + timeout_s
        attempts = {index: Attempts(deadline, kept=persistent) for index in images}
        due_s = dict.fromkeys(images, 0.0)
        while images:
            now_s = monotonic()
            due = {index: image for index, image in images.items() if due_s[index] <= now_s}
            answered = await self._submit_once(due, caller, attempts, kept)
            for index, answer in answered.items():
                pause_s = None
                if answer.error is not None:
                    pause_s = attempts[index].pause_s(answer.error, can_resubmit=False)
                if pause_s is None:
                    error = answer.error and attempts[index].outcome(answer.error)
                    answers[index] = replace(answer, error=error)
                    del images[index]
                else:
                    due_s[index] = monotonic() + pause_s
            await asyncio.sleep(min((due_s[index] for index in images), default=0.0) - monotonic())
        return [answers[index] for index in range(len(read))]

    async def _submit_once(
        self,
        images: dict[int, Image],
        caller: pb.Caller,
        attempts: dict[int, Attempts],
        kept: KeptImages | None,
    ) -> dict[int, Submitted]:
        """Make one attempt at every image, those of one server together."""
        placed = self._pool.router.place([image.digest for image in images.values()])
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for index, endpoint in zip(images, placed, strict=True):
            groups[endpoint].append(index)
        most = self.description.max_images_per_call
        calls = [
            self._submit_to(
                endpoint,
                {index: images[index] for index in indexes[begin : begin + most]},
                caller,
                attempts[indexes[begin]].left_s(),
                kept,
            )
            for endpoint, indexes in groups.items()
            for begin in range(0, len(indexes), most)
        ]
        answers: dict[int, Submitted] = {}
        try:
            for group in await asyncio.gather(*calls):
                answers |= group
        finally:
            for endpoint in placed:
                self._pool.router.end(endpoint)
        return answers

    async def _submit_to(
        self,
        endpoint: str,
        images: dict[int, Image],
        caller: pb.Caller,
        timeout_s: float,
        kept: KeptImages | None,
    ) -> dict[int, Submitted]:
        sent = list(images.values())
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._pool.connection(endpoint)
                if kept is None:
                    answers = await connection.submit(sent, caller)
                else:
                    answers = await kept.submit_to(connection, sent, caller)
        except TimeoutError:
            late = DeadlineError(f"{endpoint} did not answer before the deadline")
            return {index: Submitted(image.digest, error=late) for index, image in images.items()}
        except EncoderError as error:
            if isinstance(error, UnavailableError):
                self._pool.router.failed(endpoint)
            return {index: Submitted(image.digest, error=error) for index, image in images.items()}
        self._pool.router.succeeded(endpoint)
        for image, answer in zip(sent, answers, strict=True):
            if answer.error is None:
                self._recent.sent(image, endpoint)
        return dict(zip(images, answers, strict=True))

    def _caller(self, request_id: str, priority: int) -> pb.Caller:
        return pb.Caller(
            request_id=request_id or uuid4().hex,
            priority=priority,
            model_fingerprint=self.description.model_fingerprint,
            processor_fingerprint=self.description.processor_fingerprint,
            tenant_salt=self._tenant_salt,
            client_id=self._client_id,
        )
