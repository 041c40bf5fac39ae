"""The towers on a simulated GPU: graphs, windows and groups without a race, and with the rows of a CPU."""

import math

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from encoder_service.engine.device import CudaStream
from encoder_service.vision import attention, load_tower
from testing.reference_tower import random_patches, row_errors

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from tests.simulated_gpu import simulated_gpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = ["qwen3_vl", "qwen2_5_vl"]
GRIDS = [Grid(1, 16, 16), Grid(1, 6, 8), Grid(1, 10, 18), Grid(1, 22, 18)]
# Images of a batch, by their place in `GRIDS`: one that fills a graph, padded ones, and several.
BATCHES = [(0,), (1,), (2,), (3,), (0, 2), (1, 2, 1), (0,)]
LARGE = Grid(1, 20, 28)


@pytest.fixture(scope="module")
def folders(kept_checkpoint):
    return {kind: kept_checkpoint(kind, depth=2) for kind in FAMILIES}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(attention, "MAX_THIRD_CALL_MS", math.inf)  # the simulated device takes its time
    with simulated_gpu() as gpu:
        yield gpu


def load(folder, device="cuda:1", **options):
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device=device, dtype="bfloat16", processor=processor, **options)


def loaded(folder, **options):
    """Return a tower on the device, and a function that encodes on one stream, as the thread of the ViT does.

    The rows are on the host.
    """
    tower = load(folder, **options)
    stream = CudaStream("cuda:1")

    def encode(patches, grids):
        with stream.use():
            return [rows.cpu() for rows in tower.encode(patches, grids)]

    return tower, encode


@pytest.mark.parametrize("model_type", FAMILIES)
def test_graphs_replay_the_bits_of_eager_forwards_without_a_finding(folders, gpu, model_type):
    _, eager = loaded(folders[model_type], graphs=False)
    tower, graphs = loaded(folders[model_type], batch_patches=512)
    exact = load(folders[model_type], "cpu")
    assert tower.attention == "flash3"
    assert tower._pointwise.name == tower._resize.name == "triton"
    assert len(tower._graphs._captured) == 3
    patches = random_patches(GRIDS, tower.spec.patch_values)
    kept = []
    for batch in BATCHES:
        grids, images = [GRIDS[at] for at in batch], [patches[at] for at in batch]
        before = tower.graph_batches
        replayed = graphs(images, grids)
        assert tower.graph_batches == before + 1, batch
        for ours, other in zip(replayed, eager(images, grids), strict=True):
            assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8)), batch
        for ours, truth in zip(replayed, exact.encode(images, grids), strict=True):
            assert row_errors(ours, truth.float()).max() <= 0.03
        kept.append(replayed)
    assert torch.equal(kept[0][0], kept[4][0]), "the same image, alone and in a batch of two"
    before = tower.eager_batches
    graphs(random_patches([LARGE], tower.spec.patch_values), [LARGE])
    assert tower.eager_batches == before + 1
    assert not gpu.findings
