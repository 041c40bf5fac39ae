"""The demo: a real server, a real prefill process, a two-turn chat over images, and a check of what was promised."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from prometheus_client.parser import text_string_to_metric_families

from bench.checkpoints import write_checkpoint
from bench.demo_checks import check
from bench.demo_report import print_turn
from bench.images import photo
from prefill_client.timeline import draw

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".demo"
CHUNK_TOKENS = 384
START_S, DRAIN_S = 60.0, 40.0  # the server itself gives running calls 30 s
# Width, height (as stored) and EXIF orientation; the last two are new in turn two.
PHOTOS = (
    (1280, 720, 1), (480, 640, 6), (1024, 768, 3), (640, 480, 1),
    (720, 1280, 8), (333, 500, 2), (1600, 1200, 5), (800, 600, 7),
)  # fmt: skip
NEW_IN_TURN_TWO = 2
# Large enough to be real work for two cores, small enough for a minute.
VISION_LAYERS, TEXT_LAYERS = 8, 12
MIN_PIXELS, MAX_PIXELS = 65536, 1280 * 768
# Encoder and prefill run at the same time: half the cores each. Two on one core would spend it spinning.
THREADS = max(1, (os.cpu_count() or 2) // 2)
say = partial(print, flush=True)  # progress is shown while processes run
ENCODES = "encsvc_encoded_images_total"
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
MAX_IMAGES = 16  # of a user's folder: keeps the demo under its two minutes


def demo(images: Path | None, chunk_tokens: int, folder: Path) -> int:
    """Run the demo in `folder`; return 0 when every promise was kept."""
    began = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    files = chosen_files(images) if images else written_photos(folder / "photos")
    first, new = (files[:-NEW_IN_TURN_TWO], files[-NEW_IN_TURN_TWO:]) if len(files) > 2 else (files, [])
    say(f"checkpoint: Qwen3-VL, {VISION_LAYERS} vision and {TEXT_LAYERS} text layers, random weights")
    model = write_checkpoint(
        folder / "checkpoint",
        depth=VISION_LAYERS,
        text_layers=TEXT_LAYERS,
        preprocessor={"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}},
    )
    turns, encodes = conversation(model, chunk_tokens, folder, (first, new))
    for number, turn in enumerate(turns):
        print_turn(number, turn)
    say("\nchecking against transformers, one shot, the same pixels ...")
    results = check(model, (first, first + new), turns, encodes, folder)
    for name, kept, found in results:
        say(f"  {'kept  ' if kept else 'BROKEN'}  {name}: {found}")
    traces = [Path(turn["trace"]) for turn in turns]
    draw(traces, folder / "timeline.svg")
    picture = draw(traces, folder / "timeline.html")
    say(f"\ntimeline: {picture} (traces for Perfetto: {', '.join(trace.name for trace in traces)})")
    say(f"{time.monotonic() - began:.0f} s in all")
    broken = [name for name, kept, _ in results if not kept]
    if broken:
        say(f"demo: broken: {'; '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def conversation(
    model: Path, chunk_tokens: int, folder: Path, files: Sequence[Sequence[Path]]
) -> tuple[list[dict[str, Any]], int]:
    """Run server and prefill process; return what was told of each turn, and the server's count of encodes."""
    turns = []
    with server(model, folder / "server.log") as (endpoint, metrics):
        say(f"server: {endpoint}, log in {folder / 'server.log'}")
        for event in prefill_events(model, endpoint, chunk_tokens, folder, files):
            if event["event"] == "chunk":
                say(f"  chunk {event['chunk']}: tokens {event['begin']} to {event['end']}")
            else:
                turns.append(event)
                say(f"turn {len(turns)}: first token after {event['first_token_ms']:.0f} ms")
        with urllib.request.urlopen(f"{metrics}metrics", timeout=START_S) as answer:
            return turns, encodes_in(answer.read().decode())


def encodes_in(exposition: str) -> int:
    """Return how many images the server encoded, from its metrics."""
    samples = (sample for family in text_string_to_metric_families(exposition) for sample in family.samples)
    return int(sum(s.value for s in samples if s.name == ENCODES and s.labels["outcome"] == "kept"))


def written_photos(folder: Path) -> list[Path]:
    """Write the seeded photos and return their paths."""
    folder.mkdir(exist_ok=True)
    files = []
    for seed, (width, height, orientation) in enumerate(PHOTOS):
        files.append(folder / f"{seed}-{width}x{height}-orientation{orientation}.jpg")
        files[-1].write_bytes(photo(width, height, seed, orientation=orientation))
    return files


def chosen_files(folder: Path) -> list[Path]:
    """Return the image files of the user's folder, at most `MAX_IMAGES`."""
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not files:
        raise SystemExit(f"demo: no {', '.join(sorted(SUFFIXES))} files in {folder}")
    return files[:MAX_IMAGES]


@contextmanager
def server(
    model: Path, log: Path, batch_patches: int = MAX_PIXELS // 16**2, store_gib: float = 0.5
) -> Iterator[tuple[str, str]]:
    """Run `encoder-service serve`; give its endpoint and metrics URL. On leaving, it drains and must exit with 0."""
    command: list[str | Path] = [Path(sys.executable).with_name("encoder-service"), "serve", "--model", model]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    command += ["--store-host-gib", str(store_gib)]  # the demo uses a tenth of it
    # Batches of about one photo: prefill goes on with the first while the next is encoded.
    command += ["--torch-threads", str(THREADS), "--batch-patches", str(batch_patches)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        yield endpoints_of(process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=DRAIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise SystemExit(f"demo: the server ended with {process.returncode}, see {log}")


def endpoints_of(process: "subprocess.Popen[bytes]", log: Path) -> tuple[str, str]:
    """Wait for the server's block of settings and return the two addresses in it."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        said = dict(re.findall(r"^\s*(listening|metrics)\s+(\S+)$", log.read_text(), re.MULTILINE))
        if len(said) == 2:
            return said["listening"], said["metrics"]
        time.sleep(0.05)
    raise SystemExit(f"demo: the server did not start:\n{log.read_text()}")


def prefill_events(
    model: Path, endpoint: str, chunk_tokens: int, folder: Path, turns: Sequence[Sequence[Path]]
) -> Iterator[dict[str, Any]]:
    """Run the prefill process and yield what it tells."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "bench.demo_prefill",
        "--model",
        model,
        "--server",
        endpoint,
    ]
    command += ["--chunk", str(chunk_tokens), "--out", folder, "--threads", str(THREADS)]
    for files in turns:
        command += ["--turn", *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"demo: the prefill process ended with {process.returncode}")


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--images", type=Path, help="folder of image files instead of seeded photos")
    parser.add_argument(
        "--chunk", type=int, default=CHUNK_TOKENS, help="tokens in a prefill chunk (%(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where everything is written (%(default)s)"
    )
    args = parser.parse_args()
    return demo(args.images and args.images.resolve(), args.chunk, args.folder.resolve())


if __name__ == "__main__":
    sys.exit(main())
