"""The demo with trained weights: photos in, and a picture of what their rows know, above a timeline.

Each photo is shown with the saliency that a trained head finds in its rows, and with the three principal components of
its rows as colours: patches of one thing get one colour. The rows came over the service.
"""

import asyncio
import base64
import html
import io
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.command_line import command_line, ended, say
from prefill_client import EncoderClient, RowRequest, Trace
from prefill_reference import timeline
from testing import real_weights
from testing.server_process import HALF_THE_CORES, running

SHOWN = ("chelsea.png", "coffee.png", "rocket.jpg")
PANELS = ("photo", "saliency of its rows", "principal components of its rows")
LEFT, SIDE, GAP, TITLE = timeline.LEFT, real_weights.SIDE, 12, 20  # pixels
Pixels = NDArray[np.uint8]
Rows = NDArray[np.float32]


def demo(folder: Path) -> int:
    """Encode photos with a server of trained weights in `folder`, and draw the picture; return 0."""
    began = time.monotonic()
    say("writing a checkpoint of trained weights: DINOv2 ViT-S/14 ...")
    folder.mkdir(parents=True, exist_ok=True)
    model = real_weights.write_llava(folder / "real-checkpoint")
    photos = [real_weights.square(real_weights.photos()[name]) for name in SHOWN]
    log = folder / "real-server.log"
    with running(model, log=log, store_host_gib=0.1, threads=HALF_THE_CORES, dtype="bfloat16") as server:
        say(f"server: {server.endpoint}, log in {server.log}")
        trace = Trace("photos")
        rows = asyncio.run(encoded(server.endpoint, photos, trace))
    picture = folder / "real.svg"
    picture.write_text(drawn(photos, rows, timeline.panel(trace.to_json())))
    say(f"picture: {picture}\n{time.monotonic() - began:.0f} s in all")
    return 0


async def encoded(endpoint: str, photos: Sequence[bytes], trace: Trace) -> list[Rows]:
    """Return the rows [256, 384] of each photo, as they come over the service."""
    found: dict[int, Rows] = {}
    async with await EncoderClient.connect(endpoint) as client:
        answers = await client.submit(photos)
        trace.images([answer.digest for answer in answers])
        trace.submitted(dict(enumerate(answers)))
        async with trace.watch(client.fetch)([RowRequest(answer.digest) for answer in answers]) as outcomes:
            async for outcome in outcomes:
                found[outcome.index] = outcome.float32().copy()
    return [found[number] for number in range(len(photos))]


def saliency(photo: Pixels, rows: Rows) -> Pixels:
    """Return the photo, dark where the trained head finds nothing salient in its rows: uint8 [224, 224, 3]."""
    heat = real_weights.head(rows)
    heat = (heat - heat.min()) / (heat.max() - heat.min())
    lit = photo * (0.25 + 0.75 * heat[..., None])
    lit[..., 0] = np.clip(lit[..., 0] + 60 * heat, 0, 255)
    seen: Pixels = lit.astype(np.uint8)
    return seen


def components(rows: Rows) -> Pixels:
    """Return the three principal components of an image's rows as red, green and blue: uint8 [16, 16, 3]."""
    centred = rows - rows.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    values = centred @ directions[:3].T
    values = (values - values.min(axis=0)) / (values.max(axis=0) - values.min(axis=0))
    colours: Pixels = (255 * values).astype(np.uint8).reshape(real_weights.GRID, real_weights.GRID, 3)
    return colours


def drawn(photos: Sequence[bytes], rows: Sequence[Rows], panel: timeline.Panel) -> str:
    """Return one SVG: a column for each photo, and the timeline below."""
    below = timeline.svg([panel])
    top = len(PANELS) * (SIDE + TITLE) + GAP
    height = top + timeline.LEGEND + panel.height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {timeline.WIDTH} {height}" width="{timeline.WIDTH}"',
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{timeline.WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for line, text in enumerate(PANELS):
        parts.append(f'<text x="{LEFT}" y="{line * (SIDE + TITLE) + TITLE - 6}">{html.escape(text)}</text>')
    for column, (photo, of_photo) in enumerate(zip(photos, rows, strict=True)):
        seen = real_weights.pixels(photo)
        for line, values in enumerate((seen, saliency(seen, of_photo), components(of_photo))):
            x, y = LEFT + column * (SIDE + GAP), line * (SIDE + TITLE) + TITLE
            parts.append(image(values, x, y))
    parts.append(f'<g transform="translate(0 {top})">{below}</g>')
    return "\n".join([*parts, "</svg>"])


def image(values: Pixels, x: int, y: int) -> str:
    """Return pixels as an SVG element: patches as squares, photos as JPEG."""
    is_photo, file = len(values) > real_weights.GRID, io.BytesIO()
    Image.fromarray(values).save(file, kind := "jpeg" if is_photo else "png")
    style = "" if is_photo else ' style="image-rendering:pixelated"'
    data = base64.b64encode(file.getvalue()).decode()
    return f'<image x="{x}" y="{y}" width="{SIDE}" height="{SIDE}"{style} href="data:image/{kind};base64,{data}"/>'


def main() -> int:
    """Run the command line."""
    args = command_line("make demo REAL=1", __doc__).parse_args()
    if reason := real_weights.missing():
        raise SystemExit(f"demo: {reason}")
    return ended(lambda: demo(args.folder.resolve()))


if __name__ == "__main__":
    raise SystemExit(main())
