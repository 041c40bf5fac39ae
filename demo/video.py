"""The demo with a video: a clip that it makes itself, two questions about it, and a check of our promises."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from demo.command_line import command_line, ended, say
from demo.report import print_turn
from prefill_reference.timeline import draw
from testing.server_process import HALF_THE_CORES, running

CHUNK_TOKENS = 256
VISION_LAYERS, TEXT_LAYERS = 8, 8
# The model samples two frames per second: 20 pairs of 80 tokens.
CLIP: dict[str, Any] = {"frames": 400, "fps": 20.0, "width": 320, "height": 256}
VIDEO_SIZE = {"size": {"shortest_edge": 4096, "longest_edge": 1 << 24}}  # pixels of all frames
QUESTIONS = ("What happens in this video?", "And how does it end?")
MAX_LOGIT_ERROR = 5e-5  # as in `demo.checks`


def demo(folder: Path) -> int:
    """Run the demo in `folder`; return 0 if every promise was kept."""
    began = time.monotonic()
    say("loading torch and transformers ...")  # takes seconds
    import torch
    import transformers

    from testing.checkpoints import write_checkpoint
    from testing.clips import clip

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(HALF_THE_CORES)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"checkpoint: Qwen3-VL, {VISION_LAYERS} vision and {TEXT_LAYERS} text layers, random weights")
    model = write_checkpoint(folder / "video-checkpoint", depth=VISION_LAYERS, text_layers=TEXT_LAYERS)
    (model / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_SIZE))
    file = folder / "clip.mp4"
    file.write_bytes(clip("mp4", **CLIP))
    say(f"clip: {file}, {CLIP['frames'] / CLIP['fps']:.0f} s")
    log = folder / "video-server.log"
    with running(
        model, log=log, store_host_gib=0.5, threads=HALF_THE_CORES, batch_patches=512, video="yes"
    ) as server:
        say(f"server: {server.endpoint}, log in {server.log}")
        turns, traces, logits = asyncio.run(converse(model, server.endpoint, file.read_bytes(), folder))
        encodes = server.encodes()
    for number, turn in enumerate(turns):
        print_turn(number, turn)
    say("\nchecking against transformers, one shot, the same frames ...")
    results = check(model, file.read_bytes(), turns, logits, encodes)
    for name, kept, found in results:
        say(f"  {'kept  ' if kept else 'BROKEN'}  {name}: {found}")
    say(f"\ntimeline: {draw(traces, folder / 'video-timeline.svg')}")
    say(f"{time.monotonic() - began:.0f} s in all")
    return 0 if all(kept for _, kept, _ in results) else 1


async def converse(
    model: Path, endpoint: str, file: bytes, folder: Path
) -> tuple[list[dict[str, Any]], list[Path], list[Any]]:
    """Ask both questions, each as if from another process; return the turns, the traces and the last logits."""
    import torch
    import transformers

    from demo.prefill import chunk_json, prompt_json
    from encoder_contract.video import VideoSettings
    from prefill_client import EncoderClient, Trace
    from prefill_reference.chat import Chat
    from prefill_reference.engine import Engine
    from prefill_reference.language_model import load_language_model

    language_model = load_language_model(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    turns, traces, logits = [], [], []
    for number, question in enumerate(QUESTIONS):
        async with await EncoderClient.connect(endpoint) as client:
            engine = Engine(language_model, row_width=client.description.width)
            settings = VideoSettings.from_folder(model)
            chat = Chat(client, engine, tokenizer, chunk_tokens=CHUNK_TOKENS, videos=settings)
            trace = Trace(f"question {number + 1}")
            parts = [{"type": "video", "video": file}, {"type": "text", "text": question}]
            prefilled = await chat.prefill([{"role": "user", "content": parts}], trace=trace)
            first_token_s = time.monotonic() - trace.began_s
            tokens = [token async for token in chat.decode(prefilled, max_tokens=8)]
            chat.close()
        say(f"question {number + 1}: first token after {first_token_s * 1000:.0f} ms")
        runs = [chunk_json(run) for run in prefilled.runs]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        turns.append(
            {**prompt_json(prefilled), "runs": runs, "text": text, "first_token_ms": first_token_s * 1000}
        )
        traces.append(trace.write(folder / f"video-trace-{number + 1}.json"))
        logits.append(prefilled.logits)
        pairs = [(image.frames.first, image.frames.second) for image in prefilled.images if image.frames]
        turns[-1]["pairs"] = pairs
    return turns, traces, logits


def check(
    model: Path, file: bytes, turns: list[dict[str, Any]], logits: list[Any], encodes: int
) -> list[tuple[str, bool, str]]:
    """Return (promise, kept, finding)."""
    from demo.checks import each_row_once

    results = []
    for number, (turn, ours) in enumerate(zip(turns, logits, strict=True)):
        expected = one_shot(model, file, turn)
        error = float((ours - expected).abs().max() / expected.abs().max())
        name = f"question {number + 1} has the one-shot logits"
        results.append((name, error <= MAX_LOGIT_ERROR, f"error {error:.1e}"))
        results.append(each_row_once(number, turn))
    pairs = len(turns[0]["pairs"])
    results.append(("each pair of frames was encoded once", encodes == pairs, f"{encodes} of {pairs}"))
    waited = [sum(run["waited_ms"] for run in turn["runs"]) for turn in turns]
    cached = all(image["cached"] for image in turns[1]["images"])
    found = f"prefill waited {waited[0]:.0f} ms for rows, then {waited[1]:.0f} ms"
    return [*results, ("the second question encoded nothing", cached, found)]


def one_shot(model: Path, file: bytes, turn: dict[str, Any]) -> Any:
    """Return the last logits [vocab] of `transformers`, from one forward over all pairs."""
    import torch
    import transformers

    from encoder_contract.geometry import Grid
    from encoder_service.image.resize import PlainResize, to_patches
    from testing.clips import true_frames
    from testing.reference_tower import ReferenceTower

    tower = ReferenceTower(model, torch.float32)
    frames = [torch.from_numpy(frame) for frame in true_frames(file)]
    grids = [Grid(*image["grid"]) for image in turn["images"]]
    pixels = [torch.stack([frames[first], frames[second]]) for first, second in turn["pairs"]]
    patches = to_patches(pixels, grids, PlainResize(tower.geometry))
    whole = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([turn["prompt_ids"]])
    with torch.inference_mode():
        return whole(
            input_ids=ids,
            pixel_values_videos=tower.pixels(patches),
            video_grid_thw=torch.tensor([[len(grids), grids[0].h, grids[0].w]]),
            mm_token_type_ids=2 * (ids == whole.config.video_token_id).int(),
            logits_to_keep=1,
        ).logits[0, -1]


def main() -> int:
    """Run the command line."""
    args = command_line("make demo VIDEO=1", __doc__).parse_args()
    return ended(lambda: demo(args.folder.resolve()))


if __name__ == "__main__":
    raise SystemExit(main())
