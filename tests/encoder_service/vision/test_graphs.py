"""CUDA graphs without captures: which batches they take, what padding does, and that they can share inputs."""

import dataclasses
import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_service.vision import graphs as graphs_module
from encoder_service.vision.attention import SegmentAttention
from encoder_service.vision.graphs import (
    PATCH_BUDGETS,
    SMALL_PATCHES,
    CudaCapture,
    Graphs,
    GraphShape,
    budgets,
    padded_lengths,
)
from encoder_service.vision.layers import Segments
from encoder_service.vision.load import BATCH_PATCHES
from testing.reference_tower import random_patches, row_errors
from tests.towers import load

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class ByBounds(SegmentAttention):
    """Reads `bounds`, as device kernels do."""

    def __call__(self, query, key, value, segments, scale, between=lambda: None):
        lengths = segments.bounds.diff().tolist()
        return super().__call__(query, key, value, Segments.of(lengths, CPU), scale, between)


@pytest.fixture(scope="module")
def towers(kept_checkpoint):
    towers = {}
    for kind in ("qwen3_vl", "qwen2_5_vl"):
        towers[kind] = load(kept_checkpoint(kind, depth=2))
    return towers


def layout(tower, grids):
    return dataclasses.replace(tower._layout(grids), attend=ByBounds())


def graphs(tower, largest, capture=lambda run: run):
    """Return graphs whose replay runs the same forward over the current contents of the inputs."""
    example = layout(tower, [Grid(1, 4, 4)])
    wanted = budgets(largest, largest, persistent=False)
    return Graphs(tower._module, tower.spec, example, tower.dtype, wanted, capture)


def test_padding_fills_a_budget_with_segments_that_are_not_too_long():
    assert padded_lengths([100, 50], 400, 100, 6) == [100, 50, 100, 100, 50, 0]
    assert padded_lengths([400], 400, 400, 2) == [400, 0]
    assert padded_lengths([], 8, 8, 2) == [8, 0]


@pytest.mark.parametrize("persistent", [False, True])
def test_graph_budgets_are_few_and_hold_the_common_resolutions(persistent):
    everything = budgets(1 << 20, 1 << 20, persistent=persistent)
    assert len(everything) <= 32
    for patches in (3520, 4800, 8160, 14400):  # 720p, 960×1280, 1080p, 2560×1440
        assert any((each.patches, each.longest) == (patches, patches) for each in everything)
    assert all(budget.patches <= 2048 for budget in budgets(2048, 2048, persistent=persistent))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.cuda
def test_graphs_cover_large_single_images_and_small_batches(persistent):
    chosen = budgets(PATCH_BUDGETS[-1], BATCH_PATCHES["cuda"], persistent=persistent)
    for patches in (8160, 14400):  # 1080p, 2560×1440
        assert GraphShape(patches, 2, patches) in chosen
    several = [budget for budget in chosen if budget.segments > 2]
    assert max(budget.patches for budget in several) == BATCH_PATCHES["cuda"]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.cuda
def test_any_number_of_small_images_fits_a_graph_almost_without_padding(persistent):
    most = BATCH_PATCHES["cuda"]
    chosen = budgets(PATCH_BUDGETS[-1], most, persistent=persistent)
    for images in range(1, most // 256 + 1):
        padding = next(each for each in chosen if each.fits([256] * images)).patches - 256 * images
        assert padding <= (0 if images > 8 else 256), images


@pytest.mark.parametrize("persistent", [False, True])
def test_only_a_persistent_kernel_takes_many_thumbnails(persistent):
    chosen = budgets(PATCH_BUDGETS[-1], BATCH_PATCHES["cuda"], persistent=persistent)
    for images in range(1, SMALL_PATCHES // 64 + 1):
        taken = any(budget.fits([64] * images) for budget in chosen)
        assert taken is (persistent or images <= 12), images


@pytest.mark.parametrize("persistent", [False, True])
def test_only_a_persistent_kernel_takes_several_long_images(persistent):
    chosen = budgets(PATCH_BUDGETS[-1], BATCH_PATCHES["cuda"], persistent=persistent)
    batches = ([1200] * 4, [1900, 256], [3520, 256])  # 640×480, 800×600, 1280×720; 256×256
    taken = [any(budget.fits(lengths) for budget in chosen) for lengths in batches]
    assert taken == [persistent] * len(batches)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_single_image_has_one_graph_of_its_size(persistent):
    """A graph for several images takes single ones too, if the kernel is persistent: a second one would be idle."""
    chosen = budgets(PATCH_BUDGETS[-1], BATCH_PATCHES["cuda"], persistent=persistent)
    alone = [budget.patches for budget in chosen if budget.longest == budget.patches]
    assert len(set(alone)) == len(alone) or not persistent
    assert set(PATCH_BUDGETS) <= set(alone)


@pytest.mark.parametrize(
    ("budget", "patches", "taken"),
    [
        (512, 12, True),  # a small batch waits for launches
        (1536, 1028, True),
        (2048, 1540, True),
        (2560, 2308, True),
        (3072, 2980, False),
        (3072, 2984, True),  # three hundredths
        (3520, 3416, False),
        (3520, 3420, True),
        (14400, 13976, False),
        (14400, 13984, True),
        (3520, 3524, False),
    ],
)
@pytest.mark.cuda
def test_a_large_graph_takes_little_padding_and_a_small_one_any(budget, patches, taken):
    assert GraphShape(budget, 2, budget).fits([patches]) is taken


def test_a_batch_that_does_not_fit_a_budget_is_not_taken():
    budget = GraphShape(2048, 4, 1024)
    batches = {
        "fits": [1024] * 2,
        "too many patches": [1024] * 3,
        "too long": [1156],
        "too many segments": [256] * 8,
    }
    assert [name for name, lengths in batches.items() if budget.fits(lengths)] == ["fits"]


@pytest.mark.parametrize(
    ("width", "height", "patches"),
    [
        (640, 480, 1536),  # 1200 patches
        (640, 427, 1536),
        (512, 512, 1024),
        (640, 640, 2048),
        (854, 480, 2048),
        (800, 600, 2048),
        (1024, 768, 3072),
        (1280, 720, 3520),
    ],
)
@pytest.mark.cuda
def test_photos_of_common_sizes_fit_a_graph(width, height, patches):
    chosen = budgets(PATCH_BUDGETS[-1], BATCH_PATCHES["cuda"], persistent=False)
    one = [4 * round(height / 32) * round(width / 32)]
    assert next(budget for budget in chosen if budget.fits(one)).patches == patches


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.cuda
def test_graphs_share_one_set_of_inputs_and_give_their_batches_rows(towers, model_type):
    """Run batches through graphs of several sizes: no image sees padding or leftovers of an earlier batch."""
    tower, written = towers[model_type], set()

    def capture(run):
        written.add(run().data_ptr())
        return run

    with torch.inference_mode():
        captured = graphs(tower, 1024, capture)
        addresses = {(batch.patches.data_ptr(), batch.rows.data_ptr()) for batch, _ in captured._captured}
        assert len(captured._captured) == len(budgets(1024, 1024, persistent=False))
        assert len(addresses) == 1
        assert written == {batch.rows.data_ptr() for batch, _ in captured._captured}
        for seed, grids in enumerate(
            (
                [Grid(1, 20, 20), Grid(1, 8, 8)],
                [Grid(1, 16, 16)],
                [Grid(1, 22, 18)],
                [Grid(1, 8, 8)] * 5,
                [Grid(1, 28, 34)],
                [Grid(1, 2, 2)],
            )
        ):
            patches = random_patches(grids, tower.spec.patch_values, seed)
            before = captured.padding_patches
            padded = captured.run(patches, layout(tower, grids))
            assert padded is not None
            assert padded.isfinite().all()
            assert captured.padding_patches > before or grids == [Grid(1, 16, 16)]
            expected = torch.cat(tower.encode(patches, grids))
            assert row_errors(padded, expected).max() <= 1e-5


def test_rows_of_a_graph_survive_the_next_replays(towers):
    tower, grid = towers["qwen3_vl"], Grid(1, 16, 16)
    with torch.inference_mode():
        captured = graphs(tower, 256)
        rows = captured.run(random_patches([grid], 768, 1), layout(tower, [grid]))
        kept = rows.clone()
        captured.run(random_patches([grid], 768, 2), layout(tower, [grid]))
        assert torch.equal(rows, kept)


@pytest.mark.cuda
def test_a_failed_capture_is_logged_and_runs_eagerly(towers, caplog):
    tower, grid = towers["qwen3_vl"], Grid(1, 16, 16)

    def capture(run):
        if len(run()) > 64:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    with torch.inference_mode():
        captured = graphs(tower, 512, capture)
        patches = random_patches([grid], 768)
        assert captured.run(patches, layout(tower, [grid])) is not None
        large = Grid(1, 16, 32)
        assert captured.run(random_patches([large], 768), layout(tower, [large])) is None
    assert "no CUDA graph of 512 patches: such batches run eagerly" in caplog.text
    assert "not permitted when stream is capturing" in caplog.text


class CapturingCuda:
    """The parts of torch.cuda that `CudaCapture` calls. A capture only calls its run."""

    class CUDAGraph:
        def replay(self):
            pass

    class Stream:
        device, device_index = "cuda:0", 0

        def __init__(self, _device=None):
            pass

        def wait_stream(self, _other):
            pass

    @staticmethod
    @contextmanager
    def graph(_graph, **_options):
        yield

    @staticmethod
    @contextmanager
    def stream(_stream):
        yield

    @staticmethod
    def graph_pool_handle():
        return (0, 0)

    @staticmethod
    def current_stream(_device):
        return CapturingCuda.Stream()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.cuda
def test_graphs_of_failed_captures_are_kept(monkeypatch, fails):
    made = []

    class Graph(CapturingCuda.CUDAGraph):
        def __init__(self):
            made.append(weakref.ref(self))

    monkeypatch.setattr(CapturingCuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch, "cuda", CapturingCuda)
    monkeypatch.setattr(CudaCapture, "_end_allocation", lambda _self: None)
    monkeypatch.setattr(graphs_module, "_failed_graphs", [])

    def run():
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError) if fails else nullcontext():
        CudaCapture(torch.device("cuda:0"))(run)
    gc.collect()
    [graph] = made
    assert (graph() is not None) == fails
