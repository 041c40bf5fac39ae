"""The client of an LLM server: submits images and fetches their rows, with routing, retries and failover."""

import asyncio
from collections.abc import Sequence
from typing import Self
from uuid import uuid4

from cachetools import LRUCache

from encoder_contract.credentials import NO_CREDENTIALS, Credentials
from encoder_contract.errors import EncoderError, InternalError, InvalidRequestError
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import VideoInfo
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.put_session import PutSession
from prefill_client.fleet.submission import KeptImages, SentImages, Submission
from prefill_client.images import File, Image, RowRequest, Submitted, read_images
from prefill_client.transport import BY_DEFAULT, SHM, TRANSPORTS, Receivers, receivers
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import Description

DEFAULT_GRACE_MS = 10_000  # another process may submit an image this long after it is fetched
VIDEOS = 4096  # whose frames are remembered, some 200 bytes each
DEFAULT_TIMEOUT_S = 120.0  # users do not wait longer for a first token


class EncoderClient:
    """Asynchronous client of one server or a fleet. Make one with `await EncoderClient.connect(...)` and share it.

    `description` is what the first server said about itself: model, geometry, limits. All servers have one model.
    """

    def __init__(self, pool: Pool, *, client_id: str, tenant_salt: bytes) -> None:
        self.description: Description = pool.description
        self._pool = pool
        self._recent = SentImages()
        self._videos: LRUCache[bytes, VideoInfo] = LRUCache(VIDEOS)
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
        receivers: Receivers = receivers,
    ) -> Self:
        """Connect to one server, or to several of one model; returns once one of them answers.

        An endpoint is host:port, unix:/path, or dns:host:port for every address of the name. With `wait`, a server that
        refuses connections and a name without an address are tried again until `timeout_s`: a server that is starting
        does both. `client_id` is the name under which the servers log and count this client. Only clients with equal
        `tenant_salt` share rows. `receivers` makes the receivers for each server, where other processes read the rows.

        Raises `ModelMismatchError` if a fingerprint is given and the server has another, `UnavailableError` if no
        server answers within `timeout_s`, and `ValueError` for credentials that cannot be used.
        """
        pool = Pool(
            [endpoints] if isinstance(endpoints, str) else endpoints,
            model=model_fingerprint,
            processor=processor_fingerprint,
            channels=Channels(credentials),
            connect_timeout_s=timeout_s,
            wait=wait,
            receivers=receivers,
        )
        try:
            await pool.open()
        except BaseException:  # also when cancelled: no one else can close its connections
            await pool.close()
            raise
        return cls(pool, client_id=client_id, tenant_salt=tenant_salt)

    def for_tenant(self, tenant_salt: bytes) -> Self:
        """Return a client for another tenant on the same connections. Close the first client, not the returned one."""
        if tenant_salt == self._tenant_salt:
            return self
        return type(self)(self._pool, client_id=self._client_id, tenant_salt=tenant_salt)

    @property
    def any_serves(self) -> bool:
        """Whether at least one server is not known to be away, by its health check or by calls."""
        return self._pool.router.any_serves

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Running calls end."""
        await self._pool.close()

    async def submit(
        self,
        files: Sequence[File],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Submitted]:
        """Submit image files; return, in order, the grid and token count that the server confirmed, or the error.

        A file is bytes, a path, or an `Image`. One that is no image gets an error without a call; a path that cannot be
        read raises `OSError`. Files are sent only if the server does not have the image. Errors that a retry can cure
        are retried, at another server if necessary, until `timeout_s`.
        """
        read = await asyncio.to_thread(read_images, files, self.description.geometry)
        submission = Submission(self._pool, self._recent, self._caller(request_id, priority))
        return await submission.submit(read, timeout_s)

    async def probe(
        self,
        files: Sequence[bytes],
        digests: Sequence[bytes],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[VideoInfo | EncoderError]:
        """Return what the containers of videos say, or the error of each; servers are sent files that they lack.

        `digests` are those of the files. What a server said of a file is remembered: it is not sent for that again.
        """
        known = {digest: self._videos[digest] for digest in digests if digest in self._videos}
        asked = {
            digest: Image(file, digest, None, 0, is_video=True)
            for file, digest in zip(files, digests, strict=True)
            if digest not in known
        }
        found: dict[bytes, VideoInfo | EncoderError] = {**known}
        submission = Submission(self._pool, self._recent, self._caller(request_id, priority))
        answers = await submission.submit(list(asked.values()), timeout_s) if asked else []
        for digest, answer in zip(asked, answers, strict=True):
            if answer.video is not None:
                self._videos[digest] = answer.video
            found[digest] = (
                answer.video or answer.error or InternalError("the server did not say what the video is")
            )
        return [found[digest] for digest in digests]

    async def keep(
        self,
        files: Sequence[File],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        again_s: float = DEFAULT_TIMEOUT_S,
    ) -> KeptImages:
        """Submit image files as `submit` does, and keep them submitted until the returned `KeptImages` is closed.

        A server that lost an image is sent it again. If a server goes away, its images are submitted to another one;
        this may take `again_s` seconds. Fetch such images with `kept=True`.
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
        """Ask for rows. Iterate the stream for one outcome per request, in the order in which they become ready.

        `transports` lists the transports to use, best first; inline is always the fallback, and "device" is for callers
        that compute on a GPU. Use the stream with `async with`: the server holds shared rows until the block ends.
        `timeout_s` bounds the wait for the outcomes, not the time that rows are held. `grace_ms` is how long a server
        waits for an image that no one has submitted yet.

        Images that this client submitted are submitted again if a server lost them. With a `producer`, the rows are
        those that it put. With `kept`, another client keeps the images submitted (see `keep`), and one server after the
        other is asked until `timeout_s`. Raises `InvalidRequestError` for an unknown transport.
        """
        if unknown := {*transports} - {*TRANSPORTS}:
            raise InvalidRequestError(
                f"unknown transports {', '.join(sorted(unknown))}: use {', '.join(TRANSPORTS)}"
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
        """Return a session that puts rows which `producer` computes, at servers that accept Put.

        One session serves many images. `transports` lists the transports to use; inline is always the fallback.
        `timeout_s` bounds each step.
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
