"""Makes the pictures of the pages anew: `make pictures`.

Two replicas, a Redis, the reference prefill service and an OpenTelemetry collector run on this machine under a light
load. The pictures are one frame of `top`, the status page, the trace of a request, charts of the orders of eviction and
of engines under load, and the first page of the documentation site. Needs Chromium (Debian: apt install chromium).
"""

import argparse
import asyncio
import io
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import transformers
from PIL import Image
from rich.console import Console

from bench.harness import results
from docs import charts, site
from encoder_contract import spans
from encoder_service.top import Top, frame
from prefill_client import EncoderClient, RowRequest, traceparent
from testing.checkpoints import write_checkpoint
from testing.collector import CollectedSpan, Collector, collecting
from testing.photos import damaged, data_url, photo
from testing.processes import free_port
from testing.redis_servers import redis_server
from testing.server_process import ServerProcess
from testing.traffic import Supply, Traffic

PICTURES = Path(__file__).resolve().parent / "img"
START_S = 120.0
PHOTO = (640, 480)
CALLER = "llm-server"
SMALL = (320, 240)  # two of them are one batch
INDEX_S = 2.0  # until a replica surely knows what another one has


def found(*names: str) -> str:
    """Return the first of these programs that is installed."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise SystemExit(f"pictures: {names[0]} is not installed (Debian: apt install {names[0]})")


@contextmanager
def process(command: Sequence[str | Path], log: Path, healthy: str) -> Iterator[None]:
    """Run a program until the block ends; begin the block once the URL `healthy` answers."""
    with log.open("w") as stream:
        program = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(healthy):
            if program.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"pictures: {command[0]} did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield
    finally:
        program.terminate()
        program.wait()


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


async def load(endpoints: Sequence[str], prefill: str, seconds: float) -> None:
    """Send prompts of images, half of them seen before, chats, and now and then a damaged file."""
    ends = time.monotonic() + seconds
    async with (
        Traffic(endpoints, Supply(*PHOTO), workers=2, images=3, pause_s=0.5),
        await EncoderClient.connect(endpoints) as client,
    ):
        for number in itertools.count():
            if time.monotonic() > ends:
                return
            await asyncio.to_thread(_chat, prefill, number)
            if number % 5 == 0:
                await client.submit([damaged(number)])
            await asyncio.sleep(0.5)


def _chat(prefill: str, number: int) -> None:
    """Ask about two photos, of which the second has been asked about before."""
    photos = [data_url(photo(*PHOTO, seed)) for seed in (1000 + number, 1000 + number // 2)]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in photos]
    content = [*images, {"type": "text", "text": "What is this?"}]
    chat = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"http://{prefill}/v1/chat/completions",
        json.dumps(chat).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


async def picture_top(endpoints: list[str], seconds: float) -> str:
    """Return one frame of `encoder-service top`, over so many seconds, as SVG."""
    top = Top(endpoints)
    await top.scrape()
    await asyncio.sleep(seconds)
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(frame(await top.scrape(), console.width))
    return console.export_svg(title="encoder-service top")


async def picture_trace(collector: Collector, endpoints: Sequence[str]) -> str:
    """Return the spans of a request at one replica as SVG. Of its five images, the other replica has two."""
    known, new = ([photo(*SMALL, seed) for seed in seeds] for seeds in ((1, 2), (3, 4, 5)))
    names = {CALLER: "LLM server"}
    spans.export(CALLER, CALLER, os.environ)
    async with (
        await EncoderClient.connect(endpoints[0]) as other,
        await EncoderClient.connect(endpoints[1]) as asked,
    ):
        names |= {asked.description.replica_id: "replica", other.description.replica_id: "other replica"}
        await _rows(other, known)
        await asyncio.sleep(INDEX_S)
        trace_id = secrets.token_hex(16)
        token = traceparent.set(f"00-{trace_id}-{secrets.token_hex(8)}-01")
        await _rows(asked, [*known, *new])
        traceparent.reset(token)
    return charts.trace(await _complete(collector, trace_id), names)


async def _complete(collector: Collector, trace_id: str) -> list[CollectedSpan]:
    """Return the spans of a trace once the collector has all kinds."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = [span for span in collector.spans() if span.trace_id == trace_id]
        if {span.name for span in found} == set(spans.SpanName):
            return found
        await asyncio.sleep(1)
    raise SystemExit(f"pictures: the collector has not received all spans of trace {trace_id}")


async def _rows(client: EncoderClient, files: Sequence[bytes]) -> None:
    requests = [RowRequest(image.digest) for image in await client.submit(files)]
    async with client.fetch(requests) as outcomes:
        async for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error


def screenshot(browser: str, url: str, size: str, out: Path) -> None:
    """Write what a browser shows of a page as PNG, in 64 colours."""
    with tempfile.TemporaryDirectory() as home:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={home}",
        ]
        command = [browser, *flags, f"--window-size={size}", f"--screenshot={out}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    shot = Image.open(out)
    shot.convert("RGB").quantize(64).save(out, optimize=True)


async def _under_load(
    pictures: Callable[[], object], working: Coroutine[None, None, None], after_s: float
) -> None:
    """Make the pictures while the load runs, so many seconds after it began."""
    task = asyncio.create_task(working)
    await asyncio.sleep(after_s)
    await asyncio.to_thread(pictures)
    await task


def run(out: Path, seconds: float) -> None:
    """Start everything, make the pictures, stop everything."""
    browser = found("chromium", "google-chrome")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        transformers.utils.logging.disable_progress_bar()
        checkpoint = write_checkpoint(folder / "checkpoint", depth=4, text_layers=4)
        redis = stack.enter_context(redis_server())
        collector = stack.enter_context(collecting())
        os.environ.update(collector.environment)
        replicas = {
            f"encoder-{number}": ServerProcess(checkpoint, index=redis.url, store_host_gib=0.25, threads=1)
            for number in range(2)
        }
        for replica in replicas.values():
            stack.callback(replica.terminate)
        for replica in replicas.values():
            replica.wait_until_it_listens()
        endpoints = [replica.endpoint for replica in replicas.values()]
        watched = [replica.metrics_url for replica in replicas.values()]
        at = {
            name: url.removeprefix("http://").rstrip("/") for name, url in zip(replicas, watched, strict=True)
        }
        prefill = f"127.0.0.1:{free_port()}"
        command: list[str | Path] = [
            Path(sys.executable).with_name("prefill-reference"),
            "--model",
            checkpoint,
        ]
        command += ["--encoder", endpoints[0], "--listen", prefill, "--served-name", "chat", "--threads", "1"]
        stack.enter_context(process(command, folder / "prefill.log", f"http://{prefill}/health"))

        def pictures() -> None:
            (out / "top.svg").write_text(asyncio.run(picture_top(watched, 5.0)))
            screenshot(browser, f"http://{at['encoder-0']}/", "900,540", out / "status-page.png")

        asyncio.run(_under_load(pictures, load(endpoints, prefill, seconds), seconds * 0.8))
        (out / "trace.svg").write_text(asyncio.run(picture_trace(collector, endpoints)))
    (out / "eviction.svg").write_text(charts.eviction(results.newest("eviction")))
    (out / "engines.svg").write_text(charts.engines(results.newest("engines")))
    if site.main():
        raise SystemExit("pictures: the documentation site was not built")
    screenshot(browser, (site.SITE / "index.html").as_uri(), "1280,900", out / "docs-site.png")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of load (default %(default)s)")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder (default %(default)s)")
    given = parser.parse_args()
    run(given.out, given.seconds)


if __name__ == "__main__":
    main()
