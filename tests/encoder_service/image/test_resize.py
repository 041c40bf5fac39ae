"""Resizing for a GPU: torch's operators and the kernels give Pillow's bits, and a server starts without the kernels.

Without a GPU the kernels run in Triton's interpreter. They add integers, so the results are the same everywhere.
"""

import logging
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_contract.geometry import Geometry, Grid
from encoder_service.image import resize as bicubic
from encoder_service.image.resize import PlainResize, exact_patches, filter_table, resize_exactly, to_patches
from encoder_service.vision.load import make_resize

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")
CPU = torch.device("cpu")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

from encoder_service.image import resize_triton  # noqa: E402
from encoder_service.image.resize_triton import TritonResize, differs  # noqa: E402

# The geometries of the families, with few pixels, and one that no family has.
GEOMETRIES = {
    "qwen3_vl": Geometry(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=16384),
    "qwen2_5_vl": Geometry(patch_size=14, merge_size=2, min_pixels=784, max_pixels=12544),
    "qwen3_5": Geometry(patch_size=16, merge_size=2, min_pixels=4096, max_pixels=16384),
    "threes": Geometry(patch_size=5, merge_size=3, min_pixels=225, max_pixels=9000),
}
# (width, height): a dot, strips, shrunk, enlarged, one side shrunk and one enlarged, and the size of a grid.
SIZES = [(1, 1), (1, 200), (200, 1), (3, 2), (257, 131), (37, 51), (64, 64), (210, 84), (150, 9), (31, 33)]


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return random bytes, half of them 0 or 255, so that sums overshoot."""
    made = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    made[::2] = 255 * (made[::2] > 127)
    return made


def images(width: int, height: int, count: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.stack([noise(width, height, seed) for seed in range(count)])).to(DEVICE)


def by_pillow(array: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize rows, then columns. Pillow's own order depends on the sizes and on its version."""
    bicubic_filter, picture = Image.Resampling.BICUBIC, Image.fromarray(array)
    return np.asarray(picture.resize((size[0], picture.height), bicubic_filter).resize(size, bicubic_filter))


@pytest.fixture
def whole_rows(monkeypatch):
    """Use larger blocks than in production, because the interpreter's time depends on the number of programs."""
    monkeypatch.setattr(resize_triton, "BLOCK", (64, 256))


SOME = np.random.default_rng(3).integers(1, 180, (60, 4)).tolist()


@pytest.mark.parametrize(("width", "height", "new_width", "new_height"), [*SOME, (2600, 40, 1280, 41)])
def test_a_resize_has_the_bits_of_pillow(width, height, new_width, new_height):
    array = noise(width, height, seed=width)
    made = resize_exactly(torch.from_numpy(array).permute(2, 0, 1), (new_height, new_width))
    assert np.array_equal(made.permute(1, 2, 0).numpy(), by_pillow(array, (new_width, new_height)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.cuda
def test_patches_of_the_kernels_have_the_bits_of_the_plain_form(geometry, size, whole_rows):
    grid, pixels = geometry.grid(*size), images(*size)
    made = TritonResize(geometry).to_patches(pixels, grid)
    assert made.is_contiguous()
    assert torch.equal(made, exact_patches(pixels, grid, geometry))


def test_blocks_that_end_inside_rows_columns_and_images_lose_no_pixels():
    """With the blocks of production, which end inside rows, columns and images."""
    geometry, pixels, grid = GEOMETRIES["threes"], images(45, 7, count=2), Grid(1, 3, 27)
    rows, columns = resize_triton.BLOCK
    assert 2 * 7 % rows
    assert 2 * 3 * 15 % rows
    assert 27 * 5 % columns
    made = TritonResize(geometry).to_patches(pixels, grid)
    assert torch.equal(made, exact_patches(pixels, grid, geometry))


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_trial_at_start_passes_equal_kernels(geometry, whole_rows):
    assert not differs(geometry, DEVICE)


def test_the_trial_at_start_refuses_a_single_different_byte(monkeypatch, whole_rows):
    right = TritonResize.to_patches

    def wrong(self, images, grid):
        made = right(self, images, grid)
        made[-1, -1, -1] ^= 1
        return made

    monkeypatch.setattr(TritonResize, "to_patches", wrong)
    assert differs(GEOMETRIES["qwen3_vl"], DEVICE)


def test_a_start_without_a_compiler_falls_back_to_torch_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "encoder_service.image.resize_triton", None)
    assert make_resize(GEOMETRIES["qwen3_vl"], torch.device("cuda:0")).name == "torch"
    assert "resize to patches: using torch's, because Triton's cannot be used" in caplog.text


def test_on_the_cpu_torch_resizes_and_nothing_is_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        assert make_resize(GEOMETRIES["qwen3_vl"], CPU).name == "torch"
    assert not caplog.text


@pytest.mark.parametrize(("size", "target"), [(1, 1), (1, 4096), (4096, 1), (7, 7), (100_000, 32), (3, 2)])
def test_a_table_names_only_pixels_that_exist_and_weights_that_sum_to_one(size, target):
    start, weights = filter_table(size, target, CPU)[0], filter_table(size, target, CPU)[1:]
    assert start.min() >= 0
    assert (start + len(weights)).max() <= size
    sums = weights.sum(dim=0) / 2**bicubic.PRECISION_BITS
    assert torch.allclose(sums, torch.ones(target), atol=1e-2)


def test_tables_are_cached_up_to_their_bound():
    kept = filter_table(640, 320, CPU)
    assert filter_table(640, 320, CPU) is kept
    for size in range(50_000, 50_036):  # a megabyte each
        filter_table(size, 50_000, CPU)
    cache = bicubic._table.cache
    assert 0 < cache.currsize <= cache.maxsize
    assert filter_table(640, 320, CPU) is not kept


# Sizes of real photos: phones, screens, strips, and sizes that are no multiple of anything.
PHOTOS = [(1280, 720)] * 3 + [(960, 1280)] * 2 + [(4000, 3000), (999, 333), (20, 3000), (1, 1), (1919, 1081)]


@pytest.mark.gpu
@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.cuda
def test_a_gpu_gives_the_bits_of_pillow_with_kernels_and_without(patch):
    geometry = Geometry(patch_size=patch, merge_size=2, min_pixels=65536, max_pixels=16777216)
    chosen = make_resize(geometry, DEVICE)
    assert chosen.name == "triton"
    pixels = [torch.from_numpy(noise(*size, seed)) for seed, size in enumerate(PHOTOS)]
    grids = [geometry.grid(*size) for size in PHOTOS]
    expected = [exact_patches(p[None], g, geometry)[0] for p, g in zip(pixels, grids, strict=True)]
    on_gpu = [image.to(DEVICE) for image in pixels]
    for resize in (chosen, PlainResize(geometry)):
        for made, right in zip(to_patches(on_gpu, grids, resize), expected, strict=True):
            assert made.device == DEVICE
            assert torch.equal(made.cpu(), right)


@pytest.mark.gpu
def test_kernels_never_make_the_host_wait_and_compile_for_no_new_size():
    geometry = Geometry(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
    resize = make_resize(geometry, DEVICE)
    assert resize.name == "triton"
    compiled = [
        len(kernel.device_caches[0][0])
        for kernel in (resize_triton.along_rows_kernel, resize_triton.along_columns_kernel)
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for width, height in ((1280, 720), (1281, 721), (1, 1), (32, 1600), (1600, 16)):
            pixels = torch.zeros(1, height, width, 3, dtype=torch.uint8, device=DEVICE)
            resize.to_patches(pixels, geometry.grid(width, height))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled == [
        len(kernel.device_caches[0][0])
        for kernel in (resize_triton.along_rows_kernel, resize_triton.along_columns_kernel)
    ]
