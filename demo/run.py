"""The demo: a real server, a real prefill process, a two-turn chat over images, and a check of our promises."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from demo.command_line import command_line, ended, say
from demo.report import print_turn
from prefill_reference.timeline import draw
from testing.server_process import HALF_THE_CORES, running

ROOT = Path(__file__).parents[1]
CHUNK_TOKENS = 384
# Width and height (as stored), and EXIF orientation. The last two are new in turn two.
PHOTOS = (
    (1280, 720, 1), (480, 640, 6), (1024, 768, 3), (640, 480, 1),
    (720, 1280, 8), (333, 500, 2), (1600, 1200, 5), (800, 600, 7),
)  # fmt: skip
NEW_IN_TURN_TWO = 2
# Large enough to be real work for two cores, small enough to take a minute.
VISION_LAYERS, TEXT_LAYERS = 8, 12
MIN_PIXELS, MAX_PIXELS = 65536, 1280 * 768
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
MAX_IMAGES = 16  # of a user's folder, so that the demo takes less than two minutes


def demo(images: Path | None, chunk_tokens: int, folder: Path) -> int:
    """Run the demo in `folder`; return 0 if every promise was kept."""
    began = time.monotonic()
    say("Two turns of a chat about images: a server encodes them while a process prefills, in chunks.")
    say("No KV cache is kept between the turns: the second one reuses the encoder's work only.")
    say("Then transformers computes the same, to compare with, and a picture shows when what happened.")
    say("loading torch and transformers ...")  # takes seconds
    import transformers

    from demo.checks import check
    from testing.checkpoints import write_checkpoint

    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    files = chosen_files(images) if images else write_photos(folder / "photos")
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
    picture = draw(traces, folder / "timeline.svg")
    say(f"\ntimeline: {picture} (traces for Perfetto: {', '.join(trace.name for trace in traces)})")
    say(f"{time.monotonic() - began:.0f} s in all")
    broken = [name for name, kept, _ in results if not kept]
    if broken:
        say(f"demo: broken: {'; '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def conversation(
    model: Path, chunk_tokens: int, folder: Path, files: Sequence[Sequence[Path]]
) -> tuple[list[dict[str, Any]], int]:
    """Run server and prefill process; return the event of each turn, and the server's count of encodes."""
    turns = []
    with running(
        model,
        log=folder / "server.log",
        store_host_gib=0.5,  # the demo uses a tenth of it
        threads=HALF_THE_CORES,
        # A batch is about one photo, so that prefill runs on one photo while the next is encoded.
        batch_patches=MAX_PIXELS // 16**2,
    ) as server:
        say(f"server: {server.endpoint}, log in {server.log}")
        for event in prefill_events(model, server.endpoint, chunk_tokens, folder, files):
            if event["event"] == "chunk":
                say(f"  chunk {event['chunk']}: tokens {event['begin']} to {event['end']}")
            else:
                turns.append(event)
                say(f"turn {len(turns)}: first token after {event['first_token_ms']:.0f} ms")
        encodes = server.encodes()
    if server.process.returncode != 0:
        raise SystemExit(f"demo: the server ended with {server.process.returncode}, see {server.log}")
    return turns, encodes


def write_photos(folder: Path) -> list[Path]:
    """Write the seeded photos and return their paths."""
    from testing.photos import photo

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


def prefill_events(
    model: Path, endpoint: str, chunk_tokens: int, folder: Path, turns: Sequence[Sequence[Path]]
) -> Iterator[dict[str, Any]]:
    """Run the prefill process and yield its events."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "demo.prefill",
        "--model",
        model,
        "--server",
        endpoint,
    ]
    command += ["--chunk", str(chunk_tokens), "--out", folder, "--threads", str(HALF_THE_CORES)]
    for files in turns:
        command += ["--turn", *files]
    # In its own session it does not get Ctrl-C, at which it would print a traceback.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:  # Ctrl-C, or the caller stops reading
            process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"demo: the prefill process ended with {process.returncode}")


def main() -> int:
    """Run the command line."""
    parser = command_line("make demo", __doc__)
    parser.add_argument("--images", type=Path, help="folder of image files instead of seeded photos")
    parser.add_argument(
        "--chunk", type=int, default=CHUNK_TOKENS, help="tokens in a prefill chunk (%(default)s)"
    )
    args = parser.parse_args()
    return ended(lambda: demo(args.images and args.images.resolve(), args.chunk, args.folder.resolve()))


if __name__ == "__main__":
    sys.exit(main())
