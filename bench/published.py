"""Published stage times put through the designs of this field: time to first token over 1 to 64 images, and over turns.

A simulation, nothing here was measured by us. Stage times are those that others published for Qwen3-VL-8B on one H200;
what nobody published is arithmetic, and says so. The prompt is laid out and cut into chunks by the client's own code.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.tables import Table, table
from encoder_contract.geometry import Geometry
from prefill_client import Chunk, Layout, expand_prompt, plan

IMAGES = Path(__file__).parents[1] / "docs" / "img"

SIZES = {"720p": (1280, 720), "1080p": (1920, 1080), "1440p": (2560, 1440)}
COUNTS = (1, 2, 4, 8, 16, 32, 64)
TURNS = 8
CHUNK_TOKENS = 2048
TEXT_TOKENS = 64  # of a question
QWEN3_VL = Geometry(16, 2, 65536, 16777216)

# Published (SGLang pull request 22038, one H200): milliseconds of the tower for one image, and for eight in one batch.
VIT_MS = {"720p": 17.0, "1080p": 39.0, "1440p": 88.0}
VIT_8_MS = {"720p": 90.0, "1080p": 282.0, "1440p": 698.0}
# Published (SGLang issue on 20 images of 960×1280): decode and preprocess of all 26.5 ms, on the GPU.
PREPARE_MS_PER_PIXEL = 26.5 / (20 * 960 * 1280)
# Arithmetic: Qwen3-VL-8B's language model (8.2 G weights, 36 layers, 32 heads of 128) at half of 790 TFLOP/s, the dense
# bf16 product measured by others on an H200.
WEIGHTS, LAYERS, HEADS_WIDTH, FLOPS = 8.2e9, 36, 4096, 0.5 * 790e12
# Arithmetic: rows of 32 KiB out of one GPU and into the other at 20 GB/s each, and 1 ms for the call.
ROW_BYTES, COPY_BYTES_PER_MS, CALL_MS = 32768, 20e6, 1.0

BENCHMARK = Benchmark(
    "published",
    "What would overlap give on one H200, with stage times that others published?",
    tuple(
        Figure(f"{design}_over_ours_{size}_chunk_2048", f"32 images of {size}: {says} / ours (simulated)")
        for size in SIZES
        for design, says in (
            ("whole_set", "whole set first, one GPU"),
            ("no_overlap", "encoder GPU, no overlap"),
        )
    ),
    limit_s=60,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: `new` of its images have never been encoded, `begin` of its tokens are in the KV cache."""

    size: str
    layout: Layout
    chunks: tuple[Chunk, ...]
    new: tuple[int, ...]

    @property
    def prepare_ms(self) -> float:
        """Decode and preprocess of one image."""
        width, height = SIZES[self.size]
        return PREPARE_MS_PER_PIXEL * width * height

    @property
    def transfer_ms(self) -> float:
        """Rows of one image from the encoder's GPU into the language model's."""
        return CALL_MS + 2 * tokens(self.size) * ROW_BYTES / COPY_BYTES_PER_MS


def tokens(size: str) -> int:
    """Return the tokens of an image."""
    return QWEN3_VL.tokens(QWEN3_VL.grid(*SIZES[size]))


def prompt(size: str, images: int, *, held: int = 0, chunk_tokens: int = CHUNK_TOKENS) -> Prompt:
    """Return a prompt of images and a question, of which the first `held` images and their turns are in KV cache."""
    each = tokens(size)
    ids = [0] * TEXT_TOKENS
    for _ in range(images):
        ids += [1, *([0] * TEXT_TOKENS)] if held else [1]
    layout = expand_prompt(ids, 1, [each] * images)
    begin = layout.spans[held].begin if held else 0
    return Prompt(size, layout, plan(layout, chunk_tokens, begin=begin), tuple(range(held, images)))


def prefill_ms(chunk: Chunk) -> float:
    """Return how long a chunk's forward takes: weights, and attention to all tokens before."""
    attended = (chunk.begin + chunk.end) / 2
    per_token = 2 * WEIGHTS + 4 * LAYERS * HEADS_WIDTH * attended
    return chunk.tokens * per_token / FLOPS * 1000


def vit_ms(size: str, images: int) -> float:
    """Return the tower's time for a batch: the line through what was published for one image and for eight."""
    one, eight = VIT_MS[size], VIT_8_MS[size]
    return one + (images - 1) * (eight - one) / 7 if images else 0.0


def all_prefill_ms(request: Prompt) -> float:
    """Return the forward of all chunks."""
    return sum(prefill_ms(chunk) for chunk in request.chunks)


def whole_set_first(request: Prompt) -> float:
    """One GPU: prepare all images of the prompt, held ones too, encode them in one batch, then prefill."""
    images = len(request.layout.spans)
    return images * request.prepare_ms + vit_ms(request.size, images) + all_prefill_ms(request)


def chunk_aware(request: Prompt) -> float:
    """One GPU: before each chunk encode the new images that overlap it, as one batch; prepare runs ahead."""
    done, encoded = 0.0, set[int]()
    for chunk in request.chunks:
        wanted = {window.image for window in chunk.windows} & set(request.new) - encoded
        encoded |= wanted
        prepared = request.prepare_ms * len(encoded)
        done = max(done, prepared) + vit_ms(request.size, len(wanted)) + prefill_ms(chunk)
    return done


def encoder_then_prefill(request: Prompt) -> float:
    """An encoder GPU of its own that takes new images in one batch; prefill begins when all rows are here."""
    images = len(request.new)
    encoded = images * request.prepare_ms + vit_ms(request.size, images)
    return encoded + request.transfer_ms + all_prefill_ms(request)


def ours(request: Prompt) -> float:
    """An encoder GPU of its own, in chunk order; a chunk begins when the rows that it needs are here."""
    encoded, done, seen = 0.0, 0.0, set[int]()
    for chunk in request.chunks:
        wanted = {window.image for window in chunk.windows} & set(request.new) - seen
        rows_here = 0.0
        if wanted:
            seen |= wanted
            encoded = max(encoded, request.prepare_ms * len(seen)) + vit_ms(request.size, len(wanted))
            rows_here = encoded + request.transfer_ms
        done = max(done, rows_here) + prefill_ms(chunk)
    return done


DESIGNS: Mapping[str, Callable[[Prompt], float]] = {
    "whole set first, 1 GPU": whole_set_first,
    "chunk-aware, 1 GPU": chunk_aware,
    "encoder GPU, no overlap": encoder_then_prefill,
    "ours: encoder GPU, overlap": ours,
}
Times = dict[str, dict[str, list[float]]]


def by_images(chunk_tokens: int = CHUNK_TOKENS) -> Times:
    """Return size -> design -> milliseconds to the first token for each of `COUNTS`."""
    return _table(lambda size: [prompt(size, count, chunk_tokens=chunk_tokens) for count in COUNTS])


def by_turns() -> Times:
    """Return size -> design -> milliseconds for turns 1 to `TURNS` of a chat with one new image each."""
    return _table(lambda size: [prompt(size, turn + 1, held=turn) for turn in range(TURNS)])


def _table(prompts_of: Callable[[str], Iterable[Prompt]]) -> Times:
    return {
        size: {name: [design(each) for each in prompts_of(size)] for name, design in DESIGNS.items()}
        for size in SIZES
    }


def show() -> list[Table]:
    """Print the table of every size over images, then over turns of a chat; return them."""
    images = [f"{n} image{'s' * (n > 1)}" for n in COUNTS]
    turns = [f"turn {n + 1}" for n in range(TURNS)]
    return [
        table(
            f"{size} ({tokens(size)} tokens an image){says}",
            ["ms", *heads],
            [[name, *(f"{ms:.0f}" for ms in times)] for name, times in designs.items()],
        )
        for found, heads, says in (
            (by_images(), images, ""),
            (by_turns(), turns, ", a chat with one new image a turn"),
        )
        for size, designs in found.items()
    ]


def draw(folder: Path) -> None:
    """Draw what the tables show."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "published", "axes.spines.top": False, "axes.spines.right": False})
    turns = range(1, TURNS + 1)
    for name, found, x, label in (
        ("images", by_images(), COUNTS, "images"),
        ("turns", by_turns(), turns, "turn"),
    ):
        figure, panels = plt.subplots(1, len(SIZES), figsize=(10, 3.6))
        for panel, (size, designs) in zip(panels, found.items(), strict=True):
            for (design, times), style in zip(designs.items(), ("s:", "^:", "x--", "o-"), strict=True):
                panel.plot(x, times, style, label=design, markersize=4)
            panel.set(title=size, xlabel=label, ylim=(0, None))
        panels[0].set_ylabel("TTFT, ms (simulated)")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False
        )
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        figure.savefig(folder / f"overlap-{name}.svg", metadata={"Date": None})
        plt.close(figure)


def figures() -> dict[str, float]:
    """Return the gains at 32 images, with two sizes of chunk."""
    found = {}
    for chunk_tokens in (CHUNK_TOKENS, 8192):
        for size, designs in by_images(chunk_tokens).items():
            at = COUNTS.index(32)
            whole, _, apart, overlapped = (times[at] for times in designs.values())
            found[f"whole_set_over_ours_{size}_chunk_{chunk_tokens}"] = round(whole / overlapped, 2)
            found[f"no_overlap_over_ours_{size}_chunk_{chunk_tokens}"] = round(apart / overlapped, 2)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plots", action="store_true", help="also draw the plots of docs/overlap.md")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args()
    tables = show()
    if given.plots:
        draw(IMAGES)
    if given.json:
        print(json.dumps({**figures(), "tables": tables}))


if __name__ == "__main__":
    main()
