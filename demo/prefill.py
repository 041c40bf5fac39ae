"""The prefill process of the demo: runs a chat of several turns and prints each event as a JSON line."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from encoder_contract.errors import EncoderError
from prefill_client import EncoderClient, Trace
from prefill_reference.chat import Chat, ChunkRun, Prefilled
from prefill_reference.engine import Engine
from prefill_reference.language_model import load_language_model

QUESTIONS = ("What do these photos show?", "And these, compared with the first ones?")
ANSWER_TOKENS = 8


def arrivals(trace: Trace) -> list[dict[str, Any]]:
    """Return where the rows of each fetch came from."""
    details = [span.details for span in trace.spans if span.name in ("fetch", "hit")]
    return [{"digest": each["digest"], "source": each["source"]} for each in details]


def emit(event: str, **fields: Any) -> None:
    """Print one event."""
    print(json.dumps({"event": event, **fields}), flush=True)


def chunk_json(run: ChunkRun) -> dict[str, Any]:
    """Return a chunk's run as JSON."""
    windows = [
        {"image": w.image, "row_begin": w.row_begin, "row_end": w.row_end, "source": source}
        for w, source in zip(run.chunk.windows, run.sources, strict=True)
    ]
    return {
        "chunk": run.chunk.index,
        "begin": run.chunk.begin,
        "end": run.chunk.end,
        "windows": windows,
        "waited_ms": run.waited_ms,
        "prefill_ms": run.prefill_ms,
    }


def prompt_json(prefilled: Prefilled) -> dict[str, Any]:
    """Return a prefilled prompt as JSON."""
    return {
        "prompt_ids": prefilled.layout.token_ids.tolist(),
        "images": [
            {
                "digest": image.digest.hex(),
                "grid": image.grid,
                "tokens": image.tokens,
                "cached": prefilled.submitted[number].cached,
            }
            for number, image in enumerate(prefilled.images)
        ],
        "runs": [chunk_json(run) for run in prefilled.runs],
    }


def parts_of(files: Sequence[str], question: str) -> list[dict[str, Any]]:
    """Return the parts of a user's message: the photos, then the question."""
    images = [{"type": "image", "image": Path(file).read_bytes()} for file in files]
    return [*images, {"type": "text", "text": question}]


async def converse(args: argparse.Namespace) -> None:
    """Run the turns, and save the last-token logits of each.

    No KV cache is kept between turns, as if another process ran the second turn. Only the encoder's work is reused.
    """
    language_model = load_language_model(args.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    messages: list[dict[str, Any]] = []
    async with await EncoderClient.connect(args.server) as client:
        engine = Engine(language_model, row_width=client.description.width)
        for number, (files, question) in enumerate(zip(args.turn, QUESTIONS, strict=False)):
            messages.append({"role": "user", "content": parts_of(files, question)})
            trace = Trace(f"turn {number + 1}")
            chat = Chat(client, engine, tokenizer, chunk_tokens=args.chunk)
            prefilled = await chat.prefill(
                messages, on_chunk=lambda run: emit("chunk", **chunk_json(run)), trace=trace
            )
            prefilled_s = time.monotonic()
            tokens = [token async for token in chat.decode(prefilled, max_tokens=ANSWER_TOKENS)]
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            np.save(args.out / f"logits-{number}.npy", prefilled.logits.numpy())
            emit(
                "turn",
                first_token_ms=(prefilled_s - trace.began_s) * 1000,
                text=text,
                arrivals=arrivals(trace),
                trace=str(trace.write(args.out / f"trace-{number + 1}.json")),
                **prompt_json(prefilled),
            )
            messages.append({"role": "assistant", "content": text})
            chat.close()


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server", required=True, help="host:port")
    parser.add_argument("--chunk", type=int, required=True, help="tokens in a prefill chunk")
    parser.add_argument("--threads", type=int, required=True, help="of one matrix product")
    parser.add_argument("--out", type=Path, required=True, help="folder for the logits")
    parser.add_argument(
        "--turn", nargs="*", action="append", required=True, help="image files, once per turn"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        asyncio.run(converse(args))
    except EncoderError as error:
        print(f"prefill: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
