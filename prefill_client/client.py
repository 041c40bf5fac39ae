"""The client of an LLM server: submit images, fetch their rows; retries and failover are its own business."""

import asyncio
from collections.abc import Sequence
from typing import Self
from uuid import uuid4

from encoder_contract.errors import EncoderError, ModelMismatchError
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.connection import Connection, Description
from prefill_client.images import Image, RowRequest, Submitted, read_images
from prefill_client.row_stream import RowStream

DEFAULT_GRACE_MS = 10_000  # a Submit of another process may be this far behind its Fetch


class EncoderClient:
    """Asynchronous client; make one with `await EncoderClient.connect(...)` and share it."""

    def __init__(self, connection: Connection, *, client_id: str, tenant_salt: bytes) -> None:
        self._connection = connection
        self._client_id = client_id
        self._tenant_salt = tenant_salt

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        *,
        model_fingerprint: bytes = b"",
        processor_fingerprint: bytes = b"",
        client_id: str = "",
        tenant_salt: bytes = b"",
        timeout_s: float = 10.0,
    ) -> Self:
        """Connect to a server and check that it is the expected one.

        Raises `UnavailableError` when it cannot be reached in `timeout_s`, and `ModelMismatchError` when a given
        fingerprint is not the server's.
        """
        connection = await Connection.open(endpoint, timeout_s)
        ours = connection.description
        for what, expected, found in (
            ("model", model_fingerprint, ours.model_fingerprint),
            ("processor", processor_fingerprint, ours.processor_fingerprint),
        ):
            if expected and expected != found:
                await connection.close()
                raise ModelMismatchError(
                    f"{what} fingerprint: expected {expected.hex()}, {endpoint} has {found.hex()}"
                )
        return cls(connection, client_id=client_id, tenant_salt=tenant_salt)

    @property
    def description(self) -> Description:
        """What the server said it is."""
        return self._connection.description

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end."""
        await self._connection.close()

    async def submit(
        self,
        files: Sequence[bytes],
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Submitted]:
        """Submit image files; return, in order, the confirmed grid and token count of each, or its error.

        A file that is no image fails here, alone, without a word to the server. Bytes travel only for images that
        the server does not know.
        """
        read = await asyncio.to_thread(read_images, files, self.description.geometry)
        images = [image for image in read if isinstance(image, Image)]
        answers = iter(
            await self._connection.submit(images, self._caller(request_id, priority), timeout_s)
            if images
            else ()
        )
        return [
            Submitted(b"", error=image) if isinstance(image, EncoderError) else next(answers)
            for image in read
        ]

    def fetch(
        self,
        requests: Sequence[RowRequest],
        *,
        request_id: str = "",
        priority: int = 0,
        grace_ms: int = DEFAULT_GRACE_MS,
        shm: bool = True,
        timeout_s: float | None = None,
    ) -> RowStream:
        """Ask for rows; iterate the stream for one outcome per request, in the order of readiness.

        Use it with `async with`: rows that come by shared memory are views that hold until its end.
        """
        return self._connection.fetch(
            requests, self._caller(request_id, priority), grace_ms=grace_ms, shm=shm, timeout_s=timeout_s
        )

    def _caller(self, request_id: str, priority: int) -> pb.Caller:
        return pb.Caller(
            request_id=request_id or uuid4().hex,
            priority=priority,
            model_fingerprint=self.description.model_fingerprint,
            processor_fingerprint=self.description.processor_fingerprint,
            tenant_salt=self._tenant_salt,
            client_id=self._client_id,
        )
