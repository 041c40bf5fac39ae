"""Prefills a prompt with images chunk by chunk, while the encoder works on the next ones.

    python examples/prefill.py --model .demo/checkpoint .demo/photos/*.jpg [--server HOST:PORT]

The model is a checkpoint that the server serves, too; `make demo` leaves one. Needs the extra `reference`: its language
model stands for yours. The client does the rest: lay out, plan, fetch ahead, read.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from prefill_client import Chunk, EncoderClient, FetchedRows, PrefetchSession, RowRequest, expand_prompt, plan
from prefill_reference.engine import Embedded, Engine
from prefill_reference.language_model import load_language_model


async def prefill(model: Path, server: str, files: list[Path], chunk_tokens: int) -> None:
    """Print what each chunk waited for, and the token that follows the prompt."""
    language_model = load_language_model(model, dtype=torch.float32)
    async with await EncoderClient.connect(server) as client:
        engine = Engine(language_model, row_width=client.description.width)

        # Grids and token counts come from the files' headers, before any pixel is decoded.
        submitted = await client.submit(files)
        for path, image in zip(files, submitted, strict=True):
            if image.error:
                raise SystemExit(f"{path}: {image.error}")

        # One placeholder an image, as a chat template writes it; then which rows each chunk needs.
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
                # The rows are copied into the model's input while they are held, and checked afterwards.
                def embed(rows: Sequence[FetchedRows], chunk: Chunk = ready.chunk) -> Embedded:
                    return engine.embed(prompt, chunk, [each.tensor() for each in rows])

                embedded = await ready.read(embed)
                logits = await asyncio.to_thread(engine.run, prompt, ready.chunk, embedded)
                rows = ", ".join(f"{rows.shape[0]} {rows.source}" for rows in ready.rows)
                where = f"tokens {ready.chunk.begin} to {ready.chunk.end}"
                print(f"{where}: waited {ready.waited_ms:.1f} ms for rows {rows}")
    print(f"next token: {int(logits.argmax())}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server", default="127.0.0.1:50051")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    given = parser.parse_args()
    asyncio.run(prefill(given.model, given.server, given.files, given.chunk_tokens))


if __name__ == "__main__":
    main()
