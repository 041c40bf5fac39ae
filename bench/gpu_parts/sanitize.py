"""Runs compute-sanitizer over a small tower, its graphs, the resize, and copies between the tiers of a store.

python -m bench.gpu_parts.sanitize --device cuda --model FOLDER    # the workload that the sanitizer checks
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.harness.results import ROOT

TOOLS = ("memcheck", "synccheck", "racecheck")
WALKED = "walked: "  # prefix of the lines in which the workload says what it ran


def run(probe: Probe) -> None:
    """Note what each tool finds. A dry run only runs the workload, on the CPU."""
    from testing.checkpoints import write_checkpoint

    model = write_checkpoint(probe.scratch / "model", dtype=torch.bfloat16)
    work = [sys.executable, "-m", "bench.gpu_parts.sanitize"]
    work += ["--device", probe.device.type, "--model", str(model)]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("none",) if probe.dry else TOOLS:
        sanitized = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
        probe.attempt(tool, partial(_run, probe, [*([] if probe.dry else sanitized), *work]))


def _run(probe: Probe, command: list[str]) -> dict[str, Any]:
    left_s = max(probe.budget.left_s, 1)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left_s, check=False)
    output = (done.stdout + done.stderr).splitlines()
    print("\n    ".join([" ".join(command), *output]), flush=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {output[-1] if output else ''}")
    walked = [line.removeprefix(WALKED) for line in output if line.startswith(WALKED)]
    return {"passed": True, "walked": "; ".join(walked)}


def work(device: str, model: Path) -> None:
    """Encode images eagerly and in graphs, resize, and copy rows between the tiers."""
    from encoder_contract.geometry import Grid
    from encoder_contract.processor import ProcessorSettings
    from encoder_service.image.resize import to_patches
    from encoder_service.store import Store
    from encoder_service.vision import attention, load_tower
    from encoder_service.vision.load import make_resize
    from testing.stored import write

    attention.MAX_THIRD_CALL_MS = math.inf  # the sanitizer slows kernels down
    processor = ProcessorSettings.from_folder(model)
    grids = [Grid(1, 16, 16), Grid(1, 22, 18), Grid(1, 16, 16)]
    options = {"device": device, "dtype": "bfloat16", "processor": processor, "batch_patches": 1024}
    for graphs in (False, True) if device == "cuda" else (False,):
        tower = load_tower(model, graphs=graphs, **options)  # type: ignore[arg-type]
        shapes = [(grid.patches, tower.spec.patch_values) for grid in grids]
        rows = tower.encode([torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes], grids)
        print(f"{WALKED}attention {tower.attention}, {tower.graph_batches} batches in graphs", flush=True)
    pixels = [torch.randint(0, 256, (300, 200 + n, 3), dtype=torch.uint8, device=device) for n in range(3)]
    sizes = [processor.geometry.grid(image.shape[1], image.shape[0]) for image in pixels]
    to_patches(pixels, sizes, make_resize(processor.geometry, torch.device(device)))
    tiers: dict[str, Any] = {"host_bytes": 8 << 20, "device_bytes": 4 << 20, "device": device}
    with tempfile.TemporaryDirectory() as place:
        store = Store(**tiers, segment_dir=place, row_bytes=tower.spec.width * tower.dtype.itemsize)
        for name, kept in enumerate(rows):
            with write(store, bytes([name]), kept, Grid(1, 1, 1)) as pin:
                pin.to_host()
                assert bytes(pin.rows()[0][:64]) == kept.cpu().view(torch.uint8).numpy().tobytes()[:64]
        store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, required=True, help="a folder with a small checkpoint")
    args = parser.parse_args()
    work(args.device, args.model)
