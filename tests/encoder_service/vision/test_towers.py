"""The vision towers: equal to transformers, independent of their neighbours, bounded in memory."""

import dataclasses
import functools

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_service.vision import flops
from encoder_service.vision.load import ALIGNED_VALUES
from encoder_service.vision.tower import window_order
from testing.reference_tower import ReferenceTower, random_patches, row_errors
from tests import towers

MODEL_TYPES = ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen4_exp"]
# Square, strips, one row of the language model, more patches than a tile, and cut windows on both sides.
GRIDS = [Grid(1, 8, 12), Grid(1, 2, 2), Grid(1, 34, 20), Grid(1, 4, 40), Grid(1, 22, 18)]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folders(kept_checkpoint):
    return {kind: kept_checkpoint(kind, shards=2) for kind in MODEL_TYPES}


load = functools.cache(towers.load)


def equal_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_float32_rows_equal_transformers_in_one_batch_and_alone(folders, model_type):
    tower, reference = load(folders[model_type]), ReferenceTower(folders[model_type], torch.float32)
    patches = random_patches(GRIDS, tower.spec.patch_values)
    rows = tower.encode(patches, GRIDS)
    truth = reference.rows(reference.pixels(patches), GRIDS)
    assert truth.shape == (sum(map(len, rows)), tower.spec.width)
    assert row_errors(torch.cat(rows), truth).max() <= 1e-5
    for image, grid, alone in zip(patches, GRIDS, rows, strict=True):
        assert row_errors(alone, reference.rows(reference.pixels([image]), [grid])).max() <= 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_each_part_of_a_row_equals_transformers(folders, model_type):
    tower, reference = load(folders[model_type]), ReferenceTower(folders[model_type], torch.float32)
    patches = random_patches(GRIDS, tower.spec.patch_values, seed=1)
    rows = torch.cat(tower.encode(patches, GRIDS))
    truth = reference.rows(reference.pixels(patches), GRIDS)
    assert tower.spec.levels == (3 if model_type == "qwen3_vl" else 0)
    for ours, theirs in zip(rows.split(tower.spec.hidden, 1), truth.split(tower.spec.hidden, 1), strict=True):
        assert row_errors(ours, theirs).max() <= 1e-5
        assert torch.cosine_similarity(ours, theirs).min() >= 1 - 1e-6


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_bfloat16_error_is_no_larger_than_that_of_transformers(folders, model_type):
    folder = folders[model_type]
    truth_tower, theirs_tower = ReferenceTower(folder, torch.float32), ReferenceTower(folder, torch.bfloat16)
    patches = random_patches(GRIDS, 3 * theirs_tower.module.config.patch_size**2, seed=2)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, GRIDS)
    ours = row_errors(torch.cat(load(folder, "bfloat16").encode(patches, GRIDS)), truth)
    theirs = row_errors(theirs_tower.rows(pixels, GRIDS), truth)
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= 1.25 * theirs.max()  # one row decides a maximum


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_bfloat16_error_is_no_larger_without_residual_epilogues(folders, model_type, monkeypatch):
    """As on CUDA: weights are not packed, and the next norm adds the products."""
    monkeypatch.setattr("encoder_service.vision.layers.packing_available", lambda _: False)
    folder = folders[model_type]
    tower = load.__wrapped__(folder, "bfloat16")
    truth_tower, theirs_tower = ReferenceTower(folder, torch.float32), ReferenceTower(folder, torch.bfloat16)
    patches = random_patches(GRIDS, tower.spec.patch_values, seed=2)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, GRIDS)
    ours = row_errors(torch.cat(tower.encode(patches, GRIDS)), truth)
    assert ours.mean() <= row_errors(theirs_tower.rows(pixels, GRIDS), truth).mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_rows_do_not_depend_on_their_neighbours_to_the_bit(folders, model_type, dtype):
    tower = load(folders[model_type], dtype)
    grids = [*GRIDS, Grid(1, 16, 16), Grid(1, 26, 30)]
    patches = random_patches(grids, tower.spec.patch_values, seed=3)
    alone = [tower.encode([image], [grid])[0] for image, grid in zip(patches, grids, strict=True)]
    generator = torch.Generator().manual_seed(4)
    for _ in range(6):
        size = int(torch.randint(2, 6, (), generator=generator))
        chosen = torch.randint(len(grids), (size,), generator=generator).tolist()
        batch = tower.encode([patches[index] for index in chosen], [grids[index] for index in chosen])
        for index, rows in zip(chosen, batch, strict=True):
            assert equal_bits(rows, alone[index])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_float32_rows_of_two_frames_equal_transformers(folders, model_type):
    tower, reference = load(folders[model_type]), ReferenceTower(folders[model_type], torch.float32)
    pairs = random_patches(GRIDS, 2 * tower.spec.patch_values)
    rows = torch.cat(tower.encode(pairs, GRIDS))
    assert row_errors(rows, reference.rows(reference.pixels(pairs), GRIDS)).max() <= 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_rows_of_a_clip_equal_those_of_its_pairs_in_transformers(folders, model_type):
    """In `transformers` a clip is one grid of several pairs; attention does not cross pairs."""
    tower, reference = load(folders[model_type]), ReferenceTower(folders[model_type], torch.float32)
    pairs = random_patches([Grid(1, 8, 12)] * 3, 2 * tower.spec.patch_values, seed=8)
    rows = torch.cat(tower.encode(pairs, [Grid(1, 8, 12)] * 3))
    assert row_errors(rows, reference.rows(reference.pixels(pairs), [Grid(3, 8, 12)])).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_rows_of_two_frames_do_not_depend_on_still_images_beside_them(folders, model_type, dtype):
    tower = load(folders[model_type], dtype)
    stills = random_patches(GRIDS, tower.spec.patch_values, seed=9)
    pairs = random_patches(GRIDS, 2 * tower.spec.patch_values, seed=10)
    mixed = [image for both in zip(stills, pairs, strict=True) for image in both]
    grids = [grid for grid in GRIDS for _ in range(2)]
    for image, grid, rows in zip(mixed, grids, tower.encode(mixed, grids), strict=True):
        assert equal_bits(rows, tower.encode([image], [grid])[0])


def test_two_equal_frames_are_a_still_image_up_to_rounding(folders):
    tower = load(folders["qwen3_vl"])
    stills = random_patches(GRIDS, tower.spec.patch_values, seed=11)
    twice = [image.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).flatten(1) for image in stills]
    rows, still_rows = (torch.cat(tower.encode(images, GRIDS)) for images in (twice, stills))
    assert row_errors(rows, still_rows).max() <= 1e-5


def test_two_towers_of_one_folder_give_equal_bits(folders):
    patches = random_patches(GRIDS, 768)
    towers = (load.__wrapped__(folders["qwen3_vl"], "bfloat16") for _ in range(2))
    first, second = (torch.cat(tower.encode(patches, GRIDS)) for tower in towers)
    assert equal_bits(first, second)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_batches_split_by_patch_budget_equal_images_alone_to_the_bit(folders, model_type):
    tower = load(folders[model_type], batch_patches=300)
    patches = random_patches(GRIDS, tower.spec.patch_values, seed=5)
    values = [tower.spec.patch_values] * len(GRIDS)
    sizes = [sum(grid.patches for grid in GRIDS[batch]) for batch in tower._batches(GRIDS, values)]
    assert sizes == [100, 680, 160, 396]  # Grid(34, 20) and Grid(22, 18) are over the budget and run alone
    together = tower.encode(patches, GRIDS)
    for image, grid, rows in zip(patches, GRIDS, together, strict=True):
        assert equal_bits(rows, tower.encode([image], [grid])[0])


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_images_packed_into_one_layout_as_on_cuda_equal_images_alone(folders, model_type):
    tower = load(folders[model_type])
    patches = random_patches(GRIDS, tower.spec.patch_values, seed=6)
    with torch.inference_mode():
        [packed] = tower._module([torch.cat(patches)], [tower._layout(GRIDS)])
    assert row_errors(packed, torch.cat(tower.encode(patches, GRIDS))).max() <= 1e-5


@pytest.mark.cuda
def test_widened_mlps_change_nothing_but_rounding(folders, monkeypatch):
    """As on CUDA, where rows must be multiples of 16 bytes: 428 columns become 432. CUDA does not pack weights."""
    patches = random_patches(GRIDS, 588)
    plain = load(folders["qwen2_5_vl"])
    monkeypatch.setattr("encoder_service.vision.layers.packing_available", lambda _: False)
    widened = load.__wrapped__(folders["qwen2_5_vl"])
    widened._module.align(ALIGNED_VALUES)
    assert widened._module.blocks[0].mlp.linear_fc1.weight.shape[0] == 432
    rows = torch.cat(widened.encode(patches, GRIDS))
    assert row_errors(rows, torch.cat(plain.encode(patches, GRIDS))).max() <= 1e-5


def test_an_empty_call_returns_nothing(folders):
    assert load(folders["qwen3_vl"]).encode([], []) == []


@pytest.mark.parametrize(
    ("patches", "grid"),
    [
        (torch.zeros(16, 768), Grid(1, 4, 4)),
        (torch.zeros(15, 768, dtype=torch.uint8), Grid(1, 4, 4)),
        (torch.zeros(16, 588, dtype=torch.uint8), Grid(1, 4, 4)),
        (torch.zeros(12, 768, dtype=torch.uint8), Grid(1, 3, 4)),
        (torch.zeros(32, 768, dtype=torch.uint8), Grid(2, 4, 4)),
    ],
)
def test_patches_that_do_not_fit_their_grid_are_refused(folders, patches, grid):
    with pytest.raises(ValueError, match=r"patches|grid"):
        load(folders["qwen3_vl"]).encode([patches], [grid])


@pytest.mark.parametrize("grid", GRIDS)
def test_window_order_visits_every_row_once_and_whole_windows_first(folders, grid):
    spec = load(folders["qwen2_5_vl"]).spec
    order, windows = window_order(grid, spec)
    assert order.sort().values.tolist() == list(range(grid.patches // 4))
    assert sum(windows) == grid.patches
    assert list(windows) == sorted(windows, reverse=True)
    assert max(windows) <= spec.window**2


def test_a_forced_backend_that_cannot_run_is_an_error_at_start(folders):
    with pytest.raises(ValueError, match="attention 'flash3' cannot run here: it needs CUDA"):
        load(folders["qwen3_vl"], attention="flash3")


def test_flops_match_the_published_arithmetic(folders):
    spec = dataclasses.replace(
        load(folders["qwen3_vl"]).spec, depth=27, embed=1152, intermediate=4304, heads=16, hidden=4096
    )
    grid = Grid(1, 44, 80)
    # 0.90 GFLOP a patch and 124.4 kFLOP a pair of patches: 4.7 TFLOP for 720p.
    assert flops(spec, grid) == pytest.approx(3520 * (0.90e9 + 124.4e3 * 3520), rel=0.01)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_flops_equal_what_torch_counts_in_the_reference(folders, model_type):
    from torch.utils.flop_counter import FlopCounterMode

    tower, reference = load(folders[model_type]), ReferenceTower(folders[model_type], torch.float32)
    grid = Grid(1, 22, 18)
    pixels = reference.pixels(random_patches([grid], tower.spec.patch_values))
    reference.module.set_attn_implementation("eager")  # torch does not count the CPU's fused attention
    with FlopCounterMode(display=False) as counter:
        reference.rows(pixels, [grid])
    # torch counts the convolution over both frames; a still image needs it once.
    convolution = 2 * grid.patches * tower.spec.patch_values * tower.spec.embed
    assert flops(tower.spec, grid) == counter.get_total_flops() - convolution
