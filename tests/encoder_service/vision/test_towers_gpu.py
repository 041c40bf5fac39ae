"""The vision towers on CUDA: every backend right, graphs equal to eager, memory flat."""

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision import load_tower
from encoder_service.vision.attention import BACKENDS, why_not
from testing.checkpoints import write_checkpoint
from testing.reference_tower import ReferenceTower, random_patches, row_errors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MODEL_TYPES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5"]
GRIDS = [Grid(1, 16, 16), Grid(1, 34, 20), Grid(1, 22, 18), Grid(1, 2, 2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(root / kind, kind) for kind in MODEL_TYPES}


def load(folder, dtype="bfloat16", **options):
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device="cuda:0", dtype=dtype, processor=processor, **options)


def available():
    return [name for name in BACKENDS if not why_not(name, torch.device("cuda:0"), torch.bfloat16)]


def truth_and_errors(folder, patches):
    truth_tower = ReferenceTower(folder, torch.float32)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, GRIDS)
    theirs = ReferenceTower(folder, torch.bfloat16, "cuda:0").rows(pixels.cuda(), GRIDS)
    return truth, row_errors(theirs, truth)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_float32_rows_on_the_device_equal_those_of_the_cpu(folders, model_type):
    tower = load(folders[model_type], "float32")
    patches = random_patches(GRIDS, tower.spec.patch_values)
    truth, _ = truth_and_errors(folders[model_type], patches)
    assert row_errors(torch.cat(tower.encode(patches, GRIDS)), truth).max() <= 1e-5


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_backend_that_runs_is_as_exact_as_transformers(folders, model_type, graphs):
    patches = random_patches(GRIDS, 3 * (14 if model_type == "qwen2_5_vl" else 16) ** 2)
    truth, theirs = truth_and_errors(folders[model_type], patches)
    backends = available()
    assert len(backends) > 1, "no CUDA attention backend runs here"
    for name in backends:
        rows = load(folders[model_type], attention=name, graphs=graphs).encode(patches, GRIDS)
        assert row_errors(torch.cat(rows), truth).mean() <= 1.05 * theirs.mean(), name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_rows_of_a_graph_survive_the_next_replays(folders, model_type):
    tower = load(folders[model_type])
    assert tower._graphs is not None
    patches = random_patches(GRIDS, tower.spec.patch_values)
    first = tower.encode(patches[:1], GRIDS[:1])[0]
    kept = first.clone()
    for seed in range(3):
        tower.encode(random_patches(GRIDS, tower.spec.patch_values, seed), GRIDS)
    assert torch.equal(first, kept)
    assert torch.equal(tower.encode(patches[:1], GRIDS[:1])[0], kept)


def test_a_batch_above_the_largest_budget_runs_eagerly(folders):
    tower = load(folders["qwen3_vl"], batch_patches=600)
    grid = Grid(1, 34, 34)
    rows = tower.encode(random_patches([grid], 768), [grid])[0]
    assert rows.shape == (grid.patches // 4, tower.spec.width)
    assert rows.isfinite().all()


def test_batch_invariant_rows_do_not_depend_on_their_neighbours_to_the_bit(folders):
    tower = load(folders["qwen3_vl"], batch_invariant=True)
    patches = random_patches(GRIDS, 768)
    alone = [tower.encode([image], [grid])[0] for image, grid in zip(patches, GRIDS, strict=True)]
    for rows, expected in zip(tower.encode(patches, GRIDS), alone, strict=True):
        assert torch.equal(rows, expected)


def test_a_forward_never_waits_for_the_device(folders):
    tower = load(folders["qwen3_vl"])
    patches = [image.cuda() for image in random_patches(GRIDS, 768)]
    tower.encode(patches, GRIDS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tower.encode(patches, GRIDS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_bounded_by_the_patch_budget_whatever_the_number_of_images(folders):
    tower = load(folders["qwen3_vl"], batch_patches=4096, graphs=False)
    grid = Grid(1, 44, 80)
    image = random_patches([grid], 768)[0].cuda()

    def peak(images):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows = tower.encode([image] * images, [grid] * images)
        held = sum(part.numel() * part.element_size() for part in rows)
        return torch.cuda.max_memory_allocated() - before - held

    peak(2)
    assert peak(40) <= 1.1 * peak(2)
