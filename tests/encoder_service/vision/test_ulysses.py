"""Encoding one image in several processes: the rows of one process; no process waits for one that is gone."""

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_service.vision.ulysses import even_shares
from testing.reference_tower import random_patches, row_errors
from tests.ulysses_processes import Processes, die, hang, load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# A number of heads that no number of processes here divides.
SHAPES = {
    "qwen3_vl": {"num_heads": 5, "hidden_size": 360},
    "qwen2_5_vl": {"num_heads": 5, "hidden_size": 400},
}
LARGE, SMALL = Grid(1, 58, 54), Grid(1, 22, 18)  # the windows of both are cut on two sides


@pytest.fixture(scope="module")
def processes():
    started = Processes()
    yield started
    started.end()


@pytest.fixture(scope="module")
def folders(kept_checkpoint):
    return {kind: kept_checkpoint(kind, vision=shape) for kind, shape in SHAPES.items()}


def image(folder, dtype, grid):
    """Return random patches, and the rows of one process."""
    tower = load(folder, dtype)
    [patches] = random_patches([grid], tower.spec.patch_values)
    return patches, tower.encode([patches], [grid])[0]


@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize(
    ("size", "leader", "dtype"), [(2, 0, "float32"), (2, 1, "bfloat16"), (4, 2, "bfloat16")]
)
def test_rows_have_the_bits_of_one_process_if_slices_are_tiles(
    processes, folders, model_type, size, leader, dtype
):
    folder = folders[model_type]
    patches, alone = image(folder, dtype, LARGE)
    rows = processes.encode(folder, dtype, LARGE, leader, patches, size=size)
    assert torch.equal(rows.view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize("size", [2, 4])
def test_rows_equal_one_process_up_to_rounding_if_slices_are_not_tiles(processes, folders, model_type, size):
    """As on CUDA, where slices end at merged patches."""
    folder = folders[model_type]
    patches, truth = image(folder, "float32", SMALL)
    rows = processes.encode(folder, "float32", SMALL, 0, patches, size=size, tile=4)
    assert row_errors(rows, truth).max() <= 1e-5
    patches, alone = image(folder, "bfloat16", SMALL)
    rows = processes.encode(folder, "bfloat16", SMALL, 0, patches, size=size, tile=4)
    assert row_errors(rows, truth).mean() <= 1.05 * row_errors(alone, truth).mean()


def test_a_hanging_process_does_not_block_the_others(processes, folders):
    small = folders["qwen3_vl"], "float32", SMALL, 0, image(folders["qwen3_vl"], "float32", SMALL)[0]
    processes.encode(*small, size=2, tile=4)  # all towers are loaded now
    processes.begin(*small, size=2, tile=4, limit_s=3.0, at_block=hang)
    assert "Timed out" in processes.answer(0)
    processes.given_up.set()
    assert "Connection" in processes.answer(1), "the group to which it returns is gone"
    processes.encode(*small, size=2, tile=4)


def test_a_process_that_dies_fails_the_image_at_once(processes, folders):
    small = folders["qwen3_vl"], "float32", SMALL, 1, image(folders["qwen3_vl"], "float32", SMALL)[0]
    processes.encode(*small, size=4, tile=4)
    processes.begin(*small, size=4, tile=4, at_block=die)
    assert all("Connection" in processes.answer(rank) for rank in range(3))
    processes.encode(*small, size=3, tile=4)


def test_shares_are_equal_up_to_a_unit():
    assert even_shares(14400, 2, 256) == [7168, 7232]
    assert even_shares(16, 3) == [5, 5, 6]
    for count in range(1, 9):
        parts = even_shares(3132, count, 4)
        assert sum(parts) == 3132
        assert max(parts) - min(parts) <= 4
        assert all(part % 4 == 0 for part in parts)
