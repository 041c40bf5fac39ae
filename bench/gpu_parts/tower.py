"""Measures the vision towers on the device: speed and memory, exactness against `transformers`, kernels."""

import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.harness.towers import CASES, case_grids, full_checkpoint
from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from encoder_service.vision import Tower, flops, load_tower
from encoder_service.vision.attention import BACKENDS, why_not
from encoder_service.vision.graphs import Graphs, budgets
from testing.checkpoints import write_checkpoint
from testing.reference_tower import ReferenceTower, random_patches, row_errors

MODEL_TYPES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")
# A square image, one of several tiles, one with partial windows, and more images than a graph for one image takes.
PARITY_GRIDS = [Grid(1, 16, 16), Grid(1, 44, 80), Grid(1, 22, 18), *[Grid(1, 16, 16)] * 5]
DRY_PARITY_GRIDS = [Grid(1, 8, 8), Grid(1, 6, 10), Grid(1, 8, 8)]
DEFAULT = "default"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "no graphs": {"graphs": False},
    "batch invariant": {"batch_invariant": True},
    "9600 patches": {"batch_patches": 9600},  # 5632 is the default
    "14400 patches": {"batch_patches": 14400},
}
TOP_KERNELS = 12
SQUARE = "square product"  # its rate bounds that of a tower
MIB = 2**20


def run(probe: Probe) -> None:
    """Note speed and exactness of the default, speed of the other variants, other models, then `transformers`."""
    torch.backends.cudnn.allow_tf32 = False  # the reference's convolution must be exact
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = one_checkpoint(probe)
    probe.attempt(SQUARE, partial(_square, probe))
    backends = {name: {"attention": name, "graphs": name != "sdpa"} for name in _backends(probe)}
    variants: dict[str, dict[str, Any]] = {**VARIANTS, **backends}
    for name, options in variants.items():
        probe.attempt(name, partial(_variant, probe, folder, name, options))
        if name == DEFAULT:  # right comes before fast
            _note_exactness(probe, MODEL_TYPES[0])
    for model_type in () if probe.dry else MODEL_TYPES[1:]:
        _note_exactness(probe, model_type)
    probe.attempt("transformers", partial(_time_transformers, probe, folder))
    for case in _cases(probe):
        note_fastest(probe, case, variants)


def _note_exactness(probe: Probe, model_type: str) -> None:
    probe.attempt(f"exactness of {model_type}", partial(_exactness, probe, model_type))


def note_fastest(probe: Probe, case: str, variants: Iterable[str]) -> None:
    """Note the fastest variant of a case, beside the square product and `transformers`."""
    timed = {name: probe.figures.get(f"{case}, {name}", {}) for name in (*variants, "transformers")}
    theirs = timed.pop("transformers").get("ms")
    if not (ours := {name: found for name, found in timed.items() if "ms" in found}):
        return
    name, fastest = min(ours.items(), key=lambda each: float(each[1]["ms"]))
    ratios = {"ratio": theirs / fastest["ms"]} if theirs else {}
    if square := probe.figures.get(SQUARE, {}).get("tflops"):
        ratios["of_square"] = fastest["tflops"] / square
    probe.note(case, variant=name, ms=fastest["ms"], **ratios)


def _square(probe: Probe) -> dict[str, float]:
    size = 64 if probe.dry else 8192
    square = torch.randn(size, size, device=probe.device).bfloat16()
    ms = probe.ms(lambda: square @ square)["ms"]
    return {"ms": ms, "tflops": 2.0 * size**3 / ms / 1e9}


def one_checkpoint(probe: Probe, model_type: str = MODEL_TYPES[0]) -> Path:
    """Return the folder of a published tower, or of a tiny one in a dry run."""
    if not probe.dry:
        return full_checkpoint(model_type)
    return write_checkpoint(tempfile.mkdtemp(dir=probe.scratch), model_type, depth=2)


def load(probe: Probe, folder: Path, **options: Any) -> Tower:
    """Load our tower from a folder onto the device, in bfloat16 unless `options` say otherwise."""
    kept = {"dtype": "bfloat16", "processor": ProcessorSettings.from_folder(folder), **options}
    return load_tower(folder, device=str(probe.device), **kept)


def _backends(probe: Probe) -> list[str]:
    """Return the backends that run here; on the CPU there is no choice."""
    return [] if probe.dry else [name for name in BACKENDS if not why_not(name, probe.device, torch.bfloat16)]


def _patches(probe: Probe, tower: Tower, grids: Sequence[Grid]) -> list[torch.Tensor]:
    """Return random patches on the device, as after decoding on it."""
    return [image.to(probe.device) for image in random_patches(grids, tower.spec.patch_values)]


def _cases(probe: Probe) -> Sequence[str]:
    return ("256",) if probe.dry else tuple(CASES)


def _variant(probe: Probe, folder: Path, variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """Note every case of a variant; return the time and memory that loading took."""
    before_mib, began = _held_mib(probe), time.perf_counter()
    tower = load(probe, folder, **options)
    loaded = {"load_s": time.perf_counter() - began, "held_mib": _held_mib(probe) - before_mib}
    if probe.dry and options.get("graphs", True):  # the CPU cannot capture graphs, so replace the capture
        with torch.inference_mode():
            example = tower._layout(case_grids(tower, "256"))
            small = budgets(example.patches, example.patches, persistent=False)
            tower._graphs = Graphs(tower._module, tower.spec, example, tower.dtype, small, lambda run: run)
    for name in _cases(probe):
        probe.attempt(f"{name}, {variant}", partial(_case, probe, tower, name))
    if variant == DEFAULT:
        for name in _cases(probe)[::4]:
            probe.attempt(f"{name}, profile", partial(_profile, probe, tower, name))
    return {**loaded, "chosen": tower.attention}


def _held_mib(probe: Probe) -> float:
    """Return the memory that torch holds on the device, after emptying its cache."""
    if probe.device.type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(probe.device) / MIB


@torch.inference_mode()
def _case(probe: Probe, tower: Tower, name: str) -> dict[str, Any]:
    """Time a case, and a graph's replay alone, without copies of inputs and rows."""
    grids = case_grids(tower, name)
    patches = _patches(probe, tower, grids)
    spent = probe.ms(lambda: tower.encode(patches, grids))
    if tower._graphs and (found := tower._graphs.for_batch(tower._layout(grids))):
        spent["replay_ms"] = probe.ms(found[1])["ms"]
    return {**spent, "tflops": sum(flops(tower.spec, grid) for grid in grids) / spent["ms"] / 1e9}


def _profile(probe: Probe, tower: Tower, name: str) -> dict[str, Any]:
    """Return the kernels that take longest in one forward, with their milliseconds on the device."""
    grids, kind = case_grids(tower, name), probe.device.type
    patches, activity = _patches(probe, tower, grids), torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[getattr(activity, kind.upper())]) as profile:
        tower.encode(patches, grids)
        probe.synchronize()
    time_of = "self_device_time_total" if kind == "cuda" else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, time_of))[:TOP_KERNELS]
    return {
        "kernels": [[each.key[:60], each.count, round(getattr(each, time_of) / 1e3, 3)] for each in events]
    }


def _exactness(probe: Probe, model_type: str) -> dict[str, Any]:
    """Note the error of every backend, with and without graphs, against `transformers` in float32.

    The mean error over all rows must not exceed that of `transformers` itself in bfloat16: both round the same weights,
    so on the same device `theirs` is a bound without a margin.
    """
    folder, where = one_checkpoint(probe, model_type), str(probe.device)
    grids = DRY_PARITY_GRIDS if probe.dry else PARITY_GRIDS
    reference = ReferenceTower(folder, torch.float32, where)
    patches = random_patches(grids, 3 * reference.module.config.patch_size**2)
    pixels = reference.pixels(patches)
    truth = reference.rows(pixels, grids)
    theirs = row_errors(ReferenceTower(folder, torch.bfloat16, where).rows(pixels, grids), truth)
    reference_error = float(theirs.mean())
    del reference

    def errors(**options: Any) -> dict[str, Any]:
        ours = load(probe, folder, **options)
        packed = row_errors(torch.cat(ours.encode(patches, grids)), truth)
        pairs = zip(patches, grids, strict=True)
        single = row_errors(torch.cat([ours.encode([image], [grid])[0] for image, grid in pairs]), truth)
        bound = 1e-5 if options.get("dtype") == "float32" else reference_error
        mean = max(float(packed.mean()), float(single.mean()))
        return {
            "mean_error": mean,
            "ours / theirs": mean / reference_error,
            "max_error": float(packed.max()),
            "bound": bound,
            "passed": mean <= bound,
        }

    names, choices = ("auto", *_backends(probe)), (False,) if probe.dry else (False, True)
    exact = {"dtype": "float32", "attention": "sdpa", "graphs": False}
    probe.attempt(f"{model_type}, float32", partial(errors, **exact))
    for name, graphs in product(names, choices):
        what = f"{model_type}, {name}{', graphs' if graphs else ''}"
        probe.attempt(what, partial(errors, attention=name, graphs=graphs))
    return {"theirs_mean_error": reference_error}


def _time_transformers(probe: Probe, folder: Path) -> dict[str, Any]:
    """Note the time of `transformers` in every case."""
    reference = ReferenceTower(folder, torch.bfloat16, str(probe.device))
    ours = load(probe, folder, attention="sdpa", graphs=False)

    def measure(name: str) -> dict[str, float]:
        grids = case_grids(ours, name)
        pixels = reference.pixels(random_patches(grids, ours.spec.patch_values)).bfloat16()
        shape = torch.tensor(grids, device=probe.device)
        return probe.ms(lambda: reference.forward(pixels, shape), 10)

    for name in _cases(probe):
        probe.attempt(f"{name}, transformers", partial(measure, name))
    return {"attention": "sdpa"}
