"""Prefills a prompt with images chunk by chunk, while the encoder works on the next ones.

    python examples/prefill.py --model .demo/checkpoint .demo/photos/*.jpg [--server HOST:PORT]

The model is the checkpoint that the server serves; `make demo` creates one. Needs the extra `reference`, whose language
model stands in for yours. The client does the rest: it lays out the prompt, plans chunks, fetches ahead and reads rows.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from prefill_client import (
    Chunk,
    EncoderClient,
    EncoderError,
    FetchedRows,
    PrefetchSession,
    RowRequest,
    expand_prompt,
    plan,
)
from prefill_reference.engine import Embedded, Engine
from prefill_reference.language_model import load_language_model


async def prefill(model: Path, server: str, files: list[Path], chunk_tokens: int) -> None:
    """Prefill a prompt of all images; print how long each chunk waited, and the next token."""
    language_model = load_language_model(model, dtype=torch.float32)
    async with await EncoderClient.connect(server) as client:
        engine = Engine(language_model, row_width=client.description.width)

        # The grids and token counts come from the files' headers, before any image is decoded.
        submitted = await client.submit(files)
        for path, image in zip(files, submitted, strict=True):
            if image.error:
                raise SystemExit(f"{path}: {image.error}")

        # A chat template writes one placeholder per image. Expand them, and plan which rows each chunk needs.
        placeholders = [language_model.image_token] * len(files)
        layout = expand_prompt(
            placeholders, language_model.image_token, [image.tokens for image in submitted]
        )
        chunks = plan(layout, chunk_tokens)
        prompt = engine.start(layout, [image.grid for image in submitted if image.grid])

        images = [RowRequest(image.digest) for image in submitted]
        row_bytes = client.description.row_bytes
        async with PrefetchSession(client.fetch, chunks, images, row_bytes=row_bytes) as session:
            async for ready in session:
                # `read` lends the rows while `embed` copies them into the model's input, and checks them afterwards.
                def embed(rows: Sequence[FetchedRows], chunk: Chunk = ready.chunk) -> Embedded:
                    return engine.embed(prompt, chunk, [each.tensor() for each in rows])

                embedded = await ready.read(embed)
                logits = await asyncio.to_thread(engine.run, prompt, ready.chunk, embedded)
                rows = ", ".join(f"{rows.shape[0]} {rows.source}" for rows in ready.rows)
                where = f"tokens {ready.chunk.begin} to {ready.chunk.end}"
                print(f"{where}: waited {ready.waited_ms:.1f} ms for rows {rows}")
    print(f"next token: {int(logits.argmax())}")


def main() -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server", default="127.0.0.1:50051")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    arguments = parser.parse_args()
    try:
        asyncio.run(prefill(arguments.model, arguments.server, arguments.files, arguments.chunk_tokens))
    except (EncoderError, OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
