"""The towers on a simulated GPU: graphs, windows and groups without a race, and with the rows of a CPU."""

import math
import threading
from datetime import timedelta

import pytest
import torch

from bench.gpu_parts.predicted import eager_launches, graph_launches
from encoder_contract.geometry import Grid
from encoder_service.devices.torch_device import CudaStream
from encoder_service.devices.workers import largest_values
from encoder_service.vision import attention
from encoder_service.vision.tower import GridTables
from encoder_service.vision.ulysses import UlyssesGroup, start_rendezvous
from testing.reference_tower import random_patches, row_errors
from tests import towers
from tests.waiting import PATIENCE_S, until

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from tests.simulated_gpu import simulated_gpu
from tests.simulated_gpu.tensors import DeviceTensor

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
    return towers.load(folder, "bfloat16", device=device, **options)


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
@pytest.mark.cuda
def test_graphs_replay_the_bits_of_eager_forwards_without_a_finding(folders, gpu, model_type):
    _, eager = loaded(folders[model_type], graphs=False)
    tower, graphs = loaded(folders[model_type], batch_patches=512)
    exact = load(folders[model_type], "cpu")
    assert tower.attention == "flash3"
    assert tower._pointwise.name == tower._resize.name == "triton"
    assert len(tower._graphs._captured) == 2
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


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.cuda
def test_several_images_run_in_one_graph_however_long_they_are(folders, gpu, model_type):
    """The first is longer than a graph may take whose attention launches work for the longest image in each slot."""
    _, eager = loaded(folders[model_type], graphs=False)
    tower, graphs = loaded(folders[model_type], batch_patches=1536)
    grids = [Grid(1, 30, 40), Grid(1, 16, 16)]
    patches = random_patches(grids, tower.spec.patch_values)
    replayed = graphs(patches, grids)
    assert (tower.graph_batches, tower.padding_patches) == (1, 80)
    for ours, other in zip(replayed, eager(patches, grids), strict=True):
        assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8))
    assert not gpu.findings


@pytest.mark.parametrize("images", [1, 2])
def test_a_forward_launches_as_many_kernels_as_predicted(folders, gpu, images):
    grids = [GRIDS[0]] * images
    for graphs in (False, True):
        tower = load(folders["qwen3_vl"], batch_patches=512, graphs=graphs)
        patches = [each.pin_memory().to("cuda:1") for each in random_patches(grids, tower.spec.patch_values)]
        with CudaStream("cuda:1").use():
            tower.encode(patches, grids)  # makes the tables of the grid
            before = gpu.launches.total()
            rows = tower.encode(patches, grids)
            encoded = gpu.launches.total()
            largest_values(rows)
        predicted = graph_launches(images) if graphs else eager_launches(tower.spec, images)
        assert encoded - before == predicted
        assert gpu.launches.total() - encoded == 3, "the norms of all images, their tensor, and its copy"


def test_only_a_nan_or_an_infinity_makes_an_image_of_a_gpu_fail(gpu):
    most = torch.finfo(torch.bfloat16).max  # its square is an infinity
    rows = torch.tensor([[1.0, -most], [math.nan, 1.0], [1.0, -math.inf], [0.0, 0.0]], dtype=torch.bfloat16)
    torch.cuda.set_device("cuda:1")
    with CudaStream("cuda:1").use():
        largest = largest_values(rows.pin_memory().to("cuda:1", non_blocking=True).split(1))
        torch.cuda.current_stream().synchronize()
    assert largest.isfinite().tolist() == [True, False, False, True]
    assert not gpu.findings


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_group_of_one_has_the_rows_of_an_eager_forward(folders, gpu, model_type):
    tower, eager = loaded(folders[model_type], graphs=False)
    patches = random_patches([GRIDS[3]], tower.spec.patch_values)
    rendezvous = start_rendezvous()
    group = UlyssesGroup(torch.device("cuda:1"), rendezvous.port, 0, 1)
    torch.cuda.set_device("cuda:1")
    with torch.inference_mode(), CudaStream("cuda:1").use():
        [rows] = tower.encode_in_group(group, 0, 0, GRIDS[3], patches[0].pin_memory().to("cuda:1"))
        [alone] = eager(patches, [GRIDS[3]])
        assert torch.equal(rows.cpu().view(torch.uint8), alone.view(torch.uint8))
    assert not gpu.findings


def test_a_group_that_has_formed_connects_no_more_for_an_image(folders, gpu):
    tower, _ = loaded(folders["qwen3_vl"], graphs=False)
    [patches] = random_patches([GRIDS[3]], tower.spec.patch_values)
    rendezvous = start_rendezvous()
    group = UlyssesGroup(torch.device("cuda:1"), rendezvous.port, 0, 1)
    torch.cuda.set_device("cuda:1")
    with torch.inference_mode(), CudaStream("cuda:1").use():
        group.form(0)
        del rendezvous
        [rows] = tower.encode_in_group(group, 0, 0, GRIDS[3], patches.pin_memory().to("cuda:1"))
        assert rows.is_cuda
        group._limit = timedelta(seconds=1)
        with pytest.raises(RuntimeError):
            group.form(1)  # another group has to connect
    assert not gpu.findings


@pytest.mark.cuda
def test_an_aborted_group_gives_no_rows(folders, gpu):
    """NCCL's waits do not block, and after an abort the device goes on: only a flag says that the rows are garbage."""
    tower, _ = loaded(folders["qwen3_vl"], graphs=False)
    [patches] = random_patches([GRIDS[3]], tower.spec.patch_values)
    rendezvous = start_rendezvous()
    group, other = (UlyssesGroup(torch.device("cuda:1"), rendezvous.port, rank, 2) for rank in (0, 1))
    ended = []

    def encode():
        with other.joined(7):  # the other process joins, and then fails
            pass

    def lead():
        torch.cuda.set_device("cuda:1")
        with torch.inference_mode(), CudaStream("cuda:1").use():
            try:
                ended.append(tower.encode_in_group(group, 7, 0, GRIDS[3], patches.pin_memory().to("cuda:1")))
            except RuntimeError as error:
                ended.append(error)

    threads = [threading.Thread(target=work) for work in (encode, lead)]
    for thread in threads:
        thread.start()
    threads[0].join()
    until(lambda: threads[1].name in gpu.waiting or bool(ended))
    assert not ended, "its stream waits for the other process"
    reading = threading.Thread(target=group.abort, args=(7,))  # its current device is the first GPU
    reading.start()
    threads[1].join(PATIENCE_S)
    reading.join()
    assert "another process of group 7 has failed" in str(ended)
    with pytest.raises(RuntimeError, match="another process of group 7"), group.joined(7):
        pass
    assert not gpu.findings


def test_an_abort_before_the_others_connect_ends_the_group(gpu):
    group = UlyssesGroup(torch.device("cuda:1"), 0, 0, 1)
    group.abort(3)
    for number in (2, 3):
        with pytest.raises(RuntimeError, match="has failed"), group.joined(number):
            pass


@pytest.mark.parametrize("waits", [True, False])
def test_tables_that_another_thread_made_are_waited_for(folders, gpu, monkeypatch, waits):
    """The image's own event does not cover them: the tables of its grid were made for an image on another stream."""
    tower, encode = loaded(folders["qwen3_vl"], graphs=False)
    if not waits:
        monkeypatch.setattr(GridTables, "on_current_stream", lambda tables: tables)
    with CudaStream("cuda:1").use():
        tower.prepare(GRIDS[2])
    encode(random_patches([GRIDS[2]], tower.spec.patch_values), [GRIDS[2]])
    assert any(finding.startswith("race") for finding in gpu.findings) != waits


@pytest.mark.parametrize("records", [True, False])
def test_tables_that_are_evicted_during_a_forward_stay_in_memory(folders, gpu, monkeypatch, records):
    """The cache keeps the tables of recent grids only."""
    tower, _ = loaded(folders["qwen3_vl"], graphs=False)
    if not records:
        monkeypatch.setattr(DeviceTensor, "record_stream", lambda *_: None)
    with CudaStream("cuda:1").use():
        tower.prepare(GRIDS[2])
    patches = [
        image.pin_memory().to("cuda:1") for image in random_patches([GRIDS[2]], tower.spec.patch_values)
    ]
    stream = CudaStream("cuda:1")
    torch.cuda.synchronize()
    with stream.use():
        rows = tower.encode(patches, [GRIDS[2]])
        tower._tables.cache.clear()
    assert rows[0].is_cuda
    assert any(finding.startswith("freed") for finding in gpu.findings) != records
