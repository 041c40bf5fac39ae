"""What the parts of one Qwen3-VL block cost on this CPU, each alone: what the choices in the tower rest on.

Bfloat16, the published widths; the best of many calls counts. Compiled parts are timed where a C++ compiler is found.
"""

import shutil
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from bench.tower.lower_bound import best_of
from encoder_service.vision.layers import Linear
from encoder_service.vision.pointwise import PlainPointwise

EMBED, INTERMEDIATE, HEADS = 1152, 4304, 16
PRODUCTS = {"qkv": (EMBED, 3 * EMBED), "fc1": (EMBED, INTERMEDIATE), "fc2": (INTERMEDIATE, EMBED)}
ROWS = (64, 128, 256, 512, 3520)  # 3520: a whole 1280×720
TILE = 256
CALLS = 60
LONGEST_S = 60.0  # of all of them, where each takes the longest that it may


# What an operation's name must contain to belong to a stage; a fused epilogue counts with its product.
STAGES = {
    "products": ("linear", "addmm", "mm", "convolution"),
    "attention": ("attention",),
    "norms": ("norm",),
    "activations": ("gelu", "silu"),
}


class Table(TypedDict):
    """A table as reports quote it."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def main() -> None:
    """Print both tables."""
    for table in tables():
        show(table)


def show(table: Table) -> None:
    """Print a table, its first column as wide as its longest cell."""
    lines = [table["heads"], *table["rows"]]
    width = max(len(line[0]) for line in lines)
    print(f"\n{table['title']}:")
    for line in lines:
        print(f"{line[0]:>{width}} " + " ".join(f"{cell:>14}" for cell in line[1:]))


def stages(forward: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of one forward by stage."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        forward()
    spent = dict.fromkeys((*STAGES, "the rest"), 0.0)
    for event in recorded.key_averages():
        named = (name for name, parts in STAGES.items() if any(part in event.key for part in parts))
        spent[next(named, "the rest")] += event.self_cpu_time_total / 1e3
    return spent


@torch.inference_mode()
def tables() -> list[Table]:
    """Products by rows at once; the parts of a block at one tile of patches."""
    threads = torch.get_num_threads()
    by_rows = [[str(rows), *(_rates(rows, *shape) for shape in PRODUCTS.values())] for rows in ROWS]
    parts = [[name, f"{_best(call) * 1e6:.0f}"] for name, call in _parts().items()]
    return [
        {
            "title": f"Products on {threads} threads, TFLOP/s, weights plain → packed",
            "heads": ["rows at once", *PRODUCTS],
            "rows": by_rows,
        },
        {
            "title": f"The parts of a block at {TILE} patches on {threads} threads, each alone",
            "heads": ["part", "µs"],
            "rows": parts,
        },
    ]


def _rates(rows: int, inputs: int, outputs: int) -> str:
    plain, packed = _linear(inputs, outputs, packed=False), _linear(inputs, outputs)
    x = torch.randn(rows, inputs).bfloat16()
    flop = 2 * rows * inputs * outputs
    return " → ".join(f"{flop / _best(partial(each, x)) / 1e12:.2f}" for each in (plain, packed))


def _parts() -> dict[str, Callable[[], object]]:
    x, wide = torch.randn(TILE, EMBED).bfloat16(), torch.randn(TILE, INTERMEDIATE).bfloat16()
    sums = torch.zeros(TILE, EMBED).bfloat16()
    qkv = torch.randn(TILE, 3, HEADS, EMBED // HEADS).bfloat16()
    turns = torch.polar(
        torch.ones(TILE, 1, 1, EMBED // HEADS // 2), torch.rand(TILE, 1, 1, EMBED // HEADS // 2)
    )
    query, key, value = (part.transpose(0, 1)[None] for part in qkv.unbind(1))
    ones, zeros = torch.ones(EMBED).bfloat16(), torch.zeros(EMBED).bfloat16()
    project, output = _linear(EMBED, 3 * EMBED), _linear(EMBED, EMBED)
    fc1, fc2 = _linear(EMBED, INTERMEDIATE), _linear(INTERMEDIATE, EMBED)
    parts: dict[str, Callable[[], object]] = {
        "norm": lambda: functional.layer_norm(x, (EMBED,), ones, zeros, 1e-6),
        "qkv": lambda: project(x),
        "rotation of queries and keys": lambda: PlainPointwise().rotate(qkv[:, :2], turns, qkv[:, :2]),
        "attention": lambda: functional.scaled_dot_product_attention(query, key, value),
        "output product into the residual": lambda: output.plus(sums, x),
        "the same without the sum": lambda: output(x),
        "fc1 with GELU": lambda: fc1.gelu_tanh(x),
        "fc1 without": lambda: fc1(x),
        "GELU as a pass of its own": lambda: functional.gelu(wide, approximate="tanh"),
        "fc2 into the residual": lambda: fc2.plus(sums, wide),
        "the same without": lambda: fc2(wide),
    }
    return parts | _compiled(qkv, turns, x, wide)


def _compiled(qkv: Tensor, turns: Tensor, x: Tensor, wide: Tensor) -> dict[str, Callable[[], object]]:
    """The pointwise parts as `torch.compile` makes them; pairs of the rotation as halves, which it can vectorise."""
    if shutil.which("g++") is None:
        return {}
    cosine, sine = turns.real.contiguous(), turns.imag.contiguous()

    def rotate_halves(values: Tensor) -> Tensor:
        first, second = values.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        return rotated.to(values.dtype)

    ones, zeros = torch.ones(EMBED).bfloat16(), torch.zeros(EMBED).bfloat16()
    rotation = torch.compile(rotate_halves)
    norm, gelu = torch.compile(functional.layer_norm), torch.compile(functional.gelu)
    return {
        "rotation, compiled": lambda: rotation(qkv[:, :2]),
        "norm, compiled": lambda: norm(x, (EMBED,), ones, zeros, 1e-6),
        "GELU as a pass of its own, compiled": lambda: gelu(wide, approximate="tanh"),
    }


def _linear(inputs: int, outputs: int, *, packed: bool = True) -> Linear:
    made = Linear(inputs, outputs)
    made.weight.copy_(torch.randn(outputs, inputs) * inputs**-0.5)
    assert made.bias is not None
    made.bias.zero_()
    made.to(torch.bfloat16)
    if packed:
        made.pack(TILE)
    return made


def _best(call: Callable[[], object]) -> float:
    call()
    return best_of(CALLS, call)


if __name__ == "__main__":
    main()
