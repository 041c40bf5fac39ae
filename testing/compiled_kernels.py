"""Compiles the Triton kernels for a GPU, on a machine without one, and prints the compiler's figures for each.

The figures are registers per thread, bytes spilled to memory, and the widest memory access. Sizes are those of the
published towers.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from encoder_service.image import resize_triton
from encoder_service.image.resize import HALF, PRECISION_BITS
from encoder_service.vision import pointwise_triton

EMBED, MERGED, HEADS, HEAD_SIZE = 1152, 4608, 16, 72  # of Qwen3-VL-8B


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures for a kernel."""

    kernel: str
    registers: int
    spilled_bytes: int
    widest_access_bytes: int


@dataclass(frozen=True)
class Case:
    """A kernel, the types of its arguments (`*` marks a pointer), and its constants."""

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4


def cases() -> list[Case]:
    """Return every kernel as the published tower calls it."""
    norm = dict.fromkeys(("residual", "delta", "weight", "bias", "out"), "*bf16") | {"eps": "fp32"}
    rotation = {
        "packed": "*bf16",
        "bias": "*fp32",
        "coordinates": "*i32",
        "angles": "*fp32",
        "count": "i32",
        "stride": "i32",
    }
    pairs = {"pairs": HEADS * HEAD_SIZE, "axis_pairs": HEAD_SIZE // 4}
    block = {"block": pointwise_triton.BLOCK}
    return [
        Case(
            f"sum and {kind} of {width}",
            pointwise_triton.add_norm_kernel,
            norm,
            {"width": width, "columns": triton.next_power_of_2(width), "add": True, "rms": kind == "RMSNorm"},
            warps=8 if width > 2048 else 4,
        )
        for kind, width in (("LayerNorm", EMBED), ("LayerNorm", MERGED), ("RMSNorm", 1280))
    ] + [
        Case("rotation", pointwise_triton.rotate_kernel, rotation, pairs | block),
        Case("GELU", pointwise_triton.gelu_erf_kernel, {"values": "*bf16", "count": "i32"}, block),
        *resizes(),
    ]


def resizes() -> list[Case]:
    """Return the two passes of the resize to patches, the second pass for both patch sizes."""
    rows, columns = resize_triton.BLOCK
    block = {"half": HALF, "bits": PRECISION_BITS, "rows": rows, "columns": columns}
    along_rows = {"pixels": "*u8", "table": "*i32", "planes": "*u8"}
    along_rows |= dict.fromkeys(("lines", "height", "width", "target", "stride", "taps"), "i32")
    along_columns = {"planes": "*u8", "table": "*i32", "patches": "*u8"}
    along_columns |= dict.fromkeys(("lines", "height", "tokens", "target", "stride", "taps"), "i32")
    return [
        Case("resize along rows", resize_triton.along_rows_kernel, along_rows, block),
        *(
            Case(
                f"resize to patches of {patch}",
                resize_triton.along_columns_kernel,
                along_columns,
                block | {"patch": patch, "merge": 2},
                warps=resize_triton.ALONG_COLUMNS_WARPS,
            )
            for patch in (14, 16)
        ),
    ]


def compiled(case: Case, capability: int) -> Compiled:
    """Compile a kernel. Pointers and counts are multiples of 16, as in the towers, unless the kernel opts out."""
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(case.arguments.values())
        if kind != "fp32" and not case.kernel.params[place].do_not_specialize
    }
    signature = {**case.arguments, **dict.fromkeys(case.constants, "constexpr")}
    source = ASTSource(case.kernel, signature, dict(case.constants), aligned)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": case.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    accesses = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.[bfu](\d+)", made.asm["ptx"])
    widest = max(int(count or 1) * int(bits) // 8 for count, bits in accesses)
    return Compiled(case.name, used["REG"], used["STACK"] + used["LOCAL"], widest)


def main() -> None:
    """Print a line for each kernel, or a list with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="90: H100 and H200 (default %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [compiled(case, options.capability) for case in cases()]
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    for each in found:
        print(
            f"{each.kernel:>28}: {each.registers:3} registers, {each.spilled_bytes} bytes spilled,"
            f" {each.widest_access_bytes} bytes at once"
        )


if __name__ == "__main__":
    main()
