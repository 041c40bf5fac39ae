"""The vision towers on CUDA: every backend is correct, graphs equal eager forwards, memory stays flat."""

import math

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_contract.tower_spec import spec_of
from encoder_service.devices.workers import largest_values
from encoder_service.vision import attention
from encoder_service.vision.attention import BACKENDS, SegmentAttention, why_not
from encoder_service.vision.graphs import CudaCapture
from encoder_service.vision.load import make_pointwise
from testing.checkpoints import vision_config, write_checkpoint
from testing.reference_tower import ReferenceTower, random_patches, row_errors
from tests import towers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MODEL_TYPES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5"]
GRIDS = [Grid(1, 16, 16), Grid(1, 34, 20), Grid(1, 22, 18), Grid(1, 2, 2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(root / kind, kind) for kind in MODEL_TYPES}


def load(folder, dtype="bfloat16", **options):
    return towers.load(folder, dtype, device="cuda:0", **options)


def available():
    return [name for name in BACKENDS if not why_not(name, torch.device("cuda:0"), torch.bfloat16)]


def truth_and_errors(folder, patches):
    truth_tower = ReferenceTower(folder, torch.float32)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, GRIDS)
    theirs = ReferenceTower(folder, torch.bfloat16, "cuda:0").rows(pixels.cuda(), GRIDS)
    return truth, row_errors(theirs, truth)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.cuda
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
        assert row_errors(torch.cat(rows), truth).mean() <= theirs.mean(), name


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


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_pointwise_kernels_equal_torch_at_the_published_widths(model_type):
    from encoder_service.vision.pointwise_triton import difference

    config = {"model_type": model_type, "vision_config": vision_config(model_type, full=True)}
    spec, device = spec_of(config), torch.device("cuda:0")
    for dtype in (torch.bfloat16, torch.float16):
        assert difference(spec, device, dtype) == ""
        assert make_pointwise(spec, device, dtype).name == "triton"


@pytest.mark.parametrize("head_size", [72, 80])
@pytest.mark.cuda
def test_a_backend_that_is_slow_or_wrong_in_a_replay_is_refused(head_size):
    class ReadsLengths(SegmentAttention):
        graphs = True

    device = torch.device("cuda:0")
    plain = SegmentAttention()
    assert attention.trial_failure(plain, device, torch.bfloat16, head_size) == ""
    slow = attention.trial_failure(plain, device, torch.bfloat16, head_size, max_third_call_ms=0.0)
    assert "its third call took" in slow
    stale = attention.trial_failure(
        ReadsLengths(), device, torch.bfloat16, head_size, max_third_call_ms=math.inf
    )
    assert stale.startswith("in a replayed graph, the relative error of its rows is")


def memory_in_use():
    """Return the bytes of memory that is not free, including what other streams may still read."""
    return torch.cuda.memory_stats()["active_bytes.all.current"]


@pytest.mark.cuda
def test_an_aborted_capture_does_not_harm_the_next_one():
    device = torch.device("cuda:0")
    capture = CudaCapture(device)
    x = torch.ones(1 << 20, device=device)

    def waits():
        return x * float(x.sum())

    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(waits)
    assert torch.cuda.current_stream() == before
    replay = capture(lambda: x * 2)
    x.fill_(3)
    assert replay().unique().tolist() == [6]
    held, other = memory_in_use(), torch.cuda.Stream()
    for _ in range(3):
        crossing = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        crossing.record_stream(other)
        del crossing
        torch.cuda.synchronize()
    torch.empty(1, device=device)  # an allocation makes torch free what other streams have finished with
    assert memory_in_use() < held + (1 << 28)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
@pytest.mark.cuda
def test_a_tower_on_another_gpu_than_the_first_has_the_same_rows(folders):
    folder = folders["qwen3_vl"]
    patches = random_patches(GRIDS, 768)
    first = load(folder).encode(patches, GRIDS)
    second = towers.load(folder, "bfloat16", device="cuda:1")
    try:
        assert second._pointwise.name == "triton"
        with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
            for ours, other in zip(second.encode(patches, GRIDS), first, strict=True):
                assert row_errors(ours, other).mean() <= 0.01
    finally:
        torch.cuda.set_device(0)


@pytest.mark.cuda
def test_a_full_graph_has_the_rows_of_an_eager_forward(folders):
    grid = Grid(1, 44, 80)
    patches = random_patches([grid], 768)
    captured, eager = load(folders["qwen3_vl"]), load(folders["qwen3_vl"], graphs=False)
    truth = load(folders["qwen3_vl"], "float32").encode(patches, [grid])[0]
    errors = [row_errors(tower.encode(patches, [grid])[0], truth).mean() for tower in (captured, eager)]
    assert captured.padding_patches == 0
    assert errors[0] <= 1.05 * errors[1]


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


@pytest.mark.cuda
def test_a_forward_never_waits_for_the_device(folders):
    tower = load(folders["qwen3_vl"])
    patches = [image.cuda() for image in random_patches(GRIDS, 768)]
    tower.encode(patches, GRIDS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        largest = largest_values(tower.encode(patches, GRIDS))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert largest.isfinite().tolist() == [True] * len(GRIDS)


def test_the_patch_budget_bounds_memory_for_any_number_of_images(folders):
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
