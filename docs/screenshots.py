"""The pictures in docs/operations.md: `top` and the status page of running servers under load."""

import argparse
import asyncio
import io
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from encoder_service.top import Top, frame

PICTURES = Path(__file__).resolve().parent / "img"


async def picture_top(endpoints: list[str], seconds: float) -> str:
    """Return one frame of `encoder-service top`, over so many seconds, as SVG."""
    top = Top(endpoints)
    await top.look()
    await asyncio.sleep(seconds)
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(frame(await top.look(), console.width))
    return console.export_svg(title="encoder-service top")


def picture_page(endpoint: str, out: Path) -> None:
    """Write the status page as PNG; needs Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium here")
    with tempfile.TemporaryDirectory() as home:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={home}",
            "--window-size=900,540",
        ]
        subprocess.run(
            [browser, *flags, f"--screenshot={out}", f"http://{endpoint}/"],
            check=True,
            capture_output=True,
            timeout=60,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoints", nargs="+", help="--metrics-listen of the servers")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="what the frame of top covers (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder (default %(default)s)")
    given = parser.parse_args()
    (given.out / "top.svg").write_text(asyncio.run(picture_top(given.endpoints, given.seconds)))
    picture_page(given.endpoints[0], given.out / "status-page.png")


if __name__ == "__main__":
    main()
