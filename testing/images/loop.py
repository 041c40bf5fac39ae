"""Runs in a container: asks all replicas, by name, for a new small image each half second until /tmp/stop exists."""

import asyncio
import io
import json
import random
import sys
from pathlib import Path

from PIL import Image

from prefill_client import EncoderClient, RowRequest

CALL_S = 60.0
STARTED, STOP = Path("/tmp/started"), Path("/tmp/stop")


def new_image() -> bytes:
    """Return a PNG that nobody has sent before."""
    file = io.BytesIO()
    Image.frombytes("RGB", (32, 32), random.randbytes(32 * 32 * 3)).save(file, "PNG")
    return file.getvalue()


async def ask(client: EncoderClient) -> str:
    """Submit and fetch an image; return the error, or an empty text."""
    try:
        async with asyncio.timeout(CALL_S):
            (submitted,) = await client.submit([new_image()])
            if submitted.error is not None:
                return str(submitted.error)
            async with client.fetch([RowRequest(submitted.digest)]) as outcomes:
                async for outcome in outcomes:
                    if outcome.error is not None:
                        return str(outcome.error)
    except Exception as error:  # noqa: BLE001 - each failure is reported
        return f"{type(error).__name__}: {error}"
    return ""


async def main() -> None:
    """Print how many calls succeeded, and the errors of the others."""
    async with await EncoderClient.connect("dns:encoder:50051") as client:
        STARTED.touch()  # noqa: ASYNC240
        calls = []
        while not STOP.exists():  # noqa: ASYNC240
            calls.append(asyncio.create_task(ask(client)))
            await asyncio.sleep(0.5)
        errors = [error for error in await asyncio.gather(*calls) if error]
    json.dump({"calls": len(calls), "errors": errors}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
