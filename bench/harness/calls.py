"""Calls of a client as benchmarks time them: they read every row and raise the first error."""

import time
from collections.abc import Awaitable, Sequence
from typing import Any

from encoder_contract.digest import content_digest
from prefill_client import EncoderClient, RowRequest


async def fetch_all(client: EncoderClient, digests: Sequence[bytes], **options: Any) -> None:
    """Fetch all rows of images; raise the first error."""
    async with client.fetch([RowRequest(digest) for digest in digests], **options) as stream:
        async for rows in stream:
            if rows.error is not None:
                raise rows.error


async def submit_and_fetch(client: EncoderClient, files: Sequence[bytes], **options: Any) -> None:
    """Submit image files and fetch all their rows; raise the first error."""
    for image in await client.submit(files, **options):
        if image.error is not None:
            raise image.error
    await fetch_all(client, [content_digest(file) for file in files], **options)


async def ms_of(call: Awaitable[object]) -> float:
    """Return how long a call takes, in milliseconds."""
    began = time.perf_counter()
    await call
    return (time.perf_counter() - began) * 1e3
