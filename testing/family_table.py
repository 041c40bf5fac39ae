"""Writes the table of docs/models.md: `python -m testing.family_table` runs the parity kit on each family."""

import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

from prefill_client.sglang_gateway.model_check import SERVED

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
PLACE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- /families -->)", re.DOTALL)
HEAD = (
    "| type | models | tower | settings of | rows against `transformers` | counted | beside others | time | SGLang |",
    "|---|---|---|---|---|---|---|---|---|",
)
THREADS = 1
ROUNDS = 5  # of timing; the fastest counts
OWN = {
    "qwen3_vl": ("Qwen3-VL", "Qwen/Qwen3-VL-8B-Instruct"),
    "qwen3_vl_moe": ("Qwen3-VL (MoE)", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen2_5_vl": ("Qwen2.5-VL", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen3_5": ("Qwen3.5", "Qwen/Qwen3-VL-8B-Instruct"),
    "qwen4_exp": ("Qwen4-Exp", "Qwen/Qwen3-VL-8B-Instruct"),
}


def row_of(model_type: str) -> str:
    """Check a checkpoint of this family, and return its row of the table; raises `AssertionError` if it fails."""
    from encoder_service.families.check import check
    from testing.checkpoints import write_checkpoint
    from testing.families import CHECKPOINTS, write_family_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        write = write_checkpoint if model_type in OWN else write_family_checkpoint
        folder = write(scratch, model_type)
        findings = list(check(folder))
        assert all(finding.is_right for finding in findings), findings
        ours, theirs = cpu_seconds(folder)
    errors, counts, beside, _ = (finding.found for finding in findings)
    if model_type in OWN:
        (name, published), tower = OWN[model_type], "own"
    else:
        name, published = CHECKPOINTS[model_type].name, CHECKPOINTS[model_type].published
        tower = "`transformers`"
    return (
        f"| `{model_type}` | {name} | {tower} | `{published}` | {errors.rpartition(' ')[2]} | {counts}"
        f" | {beside.rpartition(', ')[2]} | {ours / theirs:.2f} | {in_sglang(model_type)} |"
    )


def cpu_seconds(folder: Path) -> tuple[float, float]:
    """Return the CPU times of our tower and of `transformers` for an image, from the processor's outputs to rows."""
    import torch

    from encoder_service.families.check import SIZES, WholeModel, picture
    from encoder_service.families.choice import load_family
    from encoder_service.families.model import LoadOptions

    model, whole = load_family(folder, LoadOptions(device="cpu", dtype="float32")), WholeModel(folder)
    width, height = SIZES[0]
    image, grid = picture(width, height, 0), model.geometry.grid(width, height)
    [inputs], whole_inputs = model.inputs([image], [grid]), whole.inputs(image)
    core = getattr(whole.model, "model", whole.model)
    parameters = inspect.signature(core.get_image_features).parameters
    arguments = {name: value for name, value in whole_inputs.items() if name in parameters}
    runs: tuple[Callable[[], object], ...] = (
        lambda: model.encode([inputs], [grid]),
        lambda: core.get_image_features(**arguments, return_dict=True),
    )
    best = [float("inf")] * len(runs)
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for number, run in enumerate(runs):
                began = time.process_time()
                run()
                best[number] = min(best[number], time.process_time() - began)
    return best[0], best[1]


def in_sglang(model_type: str) -> str:
    """Return how SGLang takes the rows of a family: its packages are for the server's own towers alone."""
    if model_type not in SERVED:
        return "-"
    return "packages, gateway" if model_type in OWN else "gateway"


def write(rows: Mapping[str, str], versions: str) -> None:
    """Put the rows of all families into the page."""
    lines = [*HEAD, *rows.values(), "", versions]
    PAGE.write_text(PLACE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text()))


def main() -> None:
    """Check every family, and write the table."""
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # before torch is imported
    import torch
    import torchvision
    import transformers

    from testing.families import CHECKPOINTS

    torch.set_num_threads(THREADS)
    rows = {}
    for model_type in (*OWN, *CHECKPOINTS):
        rows[model_type] = row_of(model_type)
        sys.stdout.write(f"{rows[model_type]}\n")
        sys.stdout.flush()
    cpu = re.search(r"^Model name: +(.+)$", subprocess.check_output(["lscpu"], text=True), re.MULTILINE)
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], text=True, cwd=PAGE.parent
    ).strip()
    write(
        rows,
        f"transformers {transformers.__version__}, torchvision {torchvision.__version__.partition('+')[0]},"
        f" torch {torch.__version__}, float32, one thread of {cpu[1] if cpu else 'a CPU'}, {date.today()},"
        f" at {commit}.",
    )


if __name__ == "__main__":
    main()
