"""The asynchronous client: submits images and fetches their rows, with routing, retries and failover."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self
from uuid import uuid4

from cachetools import LRUCache

from encoder_contract.credentials import NO_CREDENTIALS, Credentials
from encoder_contract.errors import EncoderError, InternalError, InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import VideoInfo
from prefill_client.fleet.fetch_stream import FetchStream
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.submission import KeptImages, KnownImages, SentImages, Submission
from prefill_client.forks import check_process, client_opens, is_forked
from prefill_client.images import File, Image, RowRequest, Submitted, read_images
from prefill_client.transport import BY_DEFAULT, TRANSPORTS, Receivers, receivers
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import Description

DEFAULT_GRACE_MS = 10_000  # how long a fetch waits for another process to submit its image
MAX_PROBED_VIDEOS = 4096  # videos whose properties are cached, some 200 bytes each
DEFAULT_TIMEOUT_S = 120.0  # users do not wait longer than this for a first token


class EncoderClient:
    """Asynchronous client of one server or a fleet of servers with one model.

    Create one with `await EncoderClient.connect(...)` and share it within its event loop. `description` has the model,
    geometry and limits, as reported by the first server that answered.
    """

    def __init__(self, pool: Pool, *, client_id: str, tenant_salt: bytes) -> None:
        self.description: Description = pool.description
        self._pool = pool
        self._recent = SentImages()
        self._videos: LRUCache[bytes, VideoInfo] = LRUCache(MAX_PROBED_VIDEOS)
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
        """Connect to one server, or to several servers of one model. Returns once one of them answers.

        An endpoint is host:port, unix:/path, or dns:host:port for every address of that name. With `wait`, servers that
        refuse connections and names that do not resolve are tried again until `timeout_s`, because a server may still
        be starting. `client_id` names this client in the servers' logs. Clients share rows only if they
        have the same `tenant_salt`. `receivers` replaces the receivers of row data, for engines whose other processes
        read the rows.

        Raises `ModelMismatchError` if a fingerprint is given and the server has a different one, `UnavailableError` if
        no server answers within `timeout_s`, `ValueError` for invalid credentials, and `InvalidRequestError` in a
        process that was forked from one with a client.
        """
        client_opens()
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
        except BaseException:  # also when cancelled: the caller gets no client to close
            await pool.close()
            raise
        return cls(pool, client_id=client_id, tenant_salt=tenant_salt)

    def for_tenant(self, tenant_salt: bytes) -> Self:
        """Return a client for another tenant that shares the connections. Close only the original client."""
        if tenant_salt == self._tenant_salt:
            return self
        return type(self)(self._pool, client_id=self._client_id, tenant_salt=tenant_salt)

    @property
    def why_down(self) -> Mapping[str, str]:
        """The last error of each server that does not serve, by endpoint."""
        return self._pool.why_down

    @property
    def any_serves(self) -> bool:
        """Whether at least one server may be up, according to health checks and earlier calls."""
        return self._pool.router.any_serves

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, which ends running calls. Does nothing in a forked process."""
        if not is_forked():
            await self._pool.close()

    async def submit(
        self,
        files: Sequence[File],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        all_or_nothing: bool = False,
    ) -> list[Submitted]:
        """Submit image files. Return one answer per file, in order: the confirmed grid and token count, or an error.

        A file is bytes, a path, or an `Image`. The client uploads a file only if the server does not have the image.
        It retries temporary errors until `timeout_s`, at other servers if necessary. A file that is not an image gets
        an error without a call. A path that cannot be read raises `OSError`.

        With `all_or_nothing`, a server that has no room for all of the images that go there takes none of them, before
        their bytes travel. If that lasts until `timeout_s`, every answer is an error, and no image stays submitted. An
        image that is itself at fault fails alone.
        """
        images = await asyncio.to_thread(read_images, files, self.description.geometry)
        submission = Submission(self._pool, self._recent, self._caller(request_id, priority))
        submit = submission.submit_together if all_or_nothing else submission.submit
        return await submit(images, timeout_s)

    async def probe(
        self,
        files: Sequence[bytes],
        digests: Sequence[bytes],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[VideoInfo | EncoderError]:
        """Return the container properties of each video file, or its error.

        `digests` are the content digests of `files`. The client uploads a file only if the server does not have it, and
        caches the answers.
        """
        cached = {digest: self._videos[digest] for digest in digests if digest in self._videos}
        unknown = {
            digest: Image(file, digest, None, 0, is_video=True)
            for file, digest in zip(files, digests, strict=True)
            if digest not in cached
        }
        results: dict[bytes, VideoInfo | EncoderError] = {**cached}
        submission = Submission(self._pool, self._recent, self._caller(request_id, priority))
        answers = await submission.submit(list(unknown.values()), timeout_s) if unknown else []
        for digest, answer in zip(unknown, answers, strict=True):
            if answer.video is not None:
                self._videos[digest] = answer.video
            results[digest] = (
                answer.video
                or answer.error
                or InternalError("the server's answer does not describe the video")
            )
        return [results[digest] for digest in digests]

    async def keep(
        self,
        files: Sequence[File],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        again_s: float = DEFAULT_TIMEOUT_S,
        all_or_nothing: bool = False,
    ) -> KeptImages:
        """Submit image files as `submit` does, and keep them submitted until the returned `KeptImages` is closed.

        If a server loses an image, the client uploads it again. If a server goes away, the client looks for another
        server for its images for up to `again_s` seconds. Fetch these images with `kept=True`.
        """
        images = await asyncio.to_thread(read_images, files, self.description.geometry)
        kept = KeptImages(self._pool, self._recent, self._caller(request_id, priority), again_s)
        try:
            submit = kept.submit_together if all_or_nothing else kept.submit
            kept.answers = await submit(images, timeout_s)
        except BaseException:
            await kept.close()
            raise
        return kept

    async def keep_known(
        self,
        images: Sequence[Image],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        again_s: float = DEFAULT_TIMEOUT_S,
    ) -> KeptImages:
        """Keep images as `keep` does that another process has submitted, by their names: no file is sent.

        The images need no `data`. The client asks `Image.submitted_to` first, then the other servers. If none of them
        has an image, neither rows nor file, its answer is a `LostImageError`, at once. If an image is lost later,
        `KeptImages.lost` says so. An image that a server encodes needs its `grid` if another server is asked.
        """
        kept = KnownImages(self._pool, self._recent, self._caller(request_id, priority), again_s)
        try:
            kept.answers = await kept.submit(images, timeout_s)
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
        kept: bool = False,
    ) -> FetchStream:
        """Request rows. Iterate the stream for one outcome per request, in the order in which they become ready.

        Use the stream with `async with`: the server holds shared rows until the block ends. `timeout_s` bounds the wait
        for the outcomes, not how long rows are held. `grace_ms` is how long a server waits for an image that has not
        been submitted yet. `transports` lists the transports to use, best first. Inline is always the fallback, and
        "device" is for callers that compute on a GPU.

        If a server lost an image that this client submitted, the client submits it again. With `kept`, a client keeps
        the images submitted (see `keep`): the stream tries one server after the other until `timeout_s`. Raises
        `InvalidRequestError` for an unknown transport.
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
            kept=kept,
        )

    def _caller(self, request_id: str, priority: int) -> pb.Caller:
        check_process()
        return pb.Caller(
            request_id=request_id or uuid4().hex,
            priority=priority,
            model_fingerprint=self.description.model_fingerprint,
            processor_fingerprint=self.description.processor_fingerprint,
            tenant_salt=self._tenant_salt,
            client_id=self._client_id,
        )
