"""Preprocessing: patches against the Pillow version of the Hugging Face processor, on the same pixels."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

from encoder_contract.geometry import Geometry, Grid
from encoder_contract.video import Frames
from encoder_service.image.resize import (
    RESIZED_BYTES_PER_PIXEL,
    PlainResize,
    _calls,
    exact_patches,
    resize_bilinear,
    to_patches,
)
from encoder_service.vision.load import make_resize
from testing.photos import photo, pixels

pytestmark = pytest.mark.slow

QWEN3_VL = Geometry(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
QWEN25_VL = Geometry(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=12845056)
SMALL = Geometry(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=50176)
RESIZE = PlainResize(QWEN3_VL)
MEAN = {QWEN3_VL: [0.5] * 3, QWEN25_VL: [0.48145466, 0.4578275, 0.40821073], SMALL: [0.5] * 3}
STD = {QWEN3_VL: [0.5] * 3, QWEN25_VL: [0.26862954, 0.26130258, 0.27577711], SMALL: [0.5] * 3}

# (width, height): equal to the grid, odd, up- and downscaled, strips.
SHAPES = {
    QWEN3_VL: [(1280, 720), (256, 256), (37, 51), (640, 481), (1, 1), (255, 257), (999, 333), (20, 3000)],
    QWEN25_VL: [(1280, 720), (28, 28), (37, 51), (640, 481), (15, 15), (255, 257), (333, 999), (3000, 20)],
    SMALL: [(1280, 720), (224, 224), (1001, 37), (640, 481), (225, 223), (1600, 1200), (333, 999), (90, 3000)],
}  # fmt: skip
CASES = [(geometry, size) for geometry, sizes in SHAPES.items() for size in sizes]


def by_processor(picture: Image.Image, geometry: Geometry, **options) -> tuple[torch.Tensor, list[int]]:
    """Return `transformers`' patches of both temporal slots, [patches, 3, 2, patch²], and its grid."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=geometry.patch_size,
        merge_size=geometry.merge_size,
        size={"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels},
        image_mean=MEAN[geometry],
        image_std=STD[geometry],
    )
    made = processor(images=picture, return_tensors="pt", **options)
    return made["pixel_values"].reshape(-1, 3, 2, geometry.patch_size**2), made["image_grid_thw"][0].tolist()


def rows_first(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize rows, then columns, as Pillow did in one call before version 13 began to choose the order."""
    bicubic = Image.Resampling.BICUBIC
    return picture.resize((size[0], picture.height), bicubic).resize(size, bicubic)


def level_differences(patches: torch.Tensor, expected: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    assert patches.dtype == torch.uint8
    assert patches.is_contiguous()
    assert patches.shape == (expected.shape[0], 3 * geometry.patch_size**2)
    assert torch.equal(expected[:, :, 0], expected[:, :, 1])
    return (
        (normalised(patches, geometry) - expected[:, :, 0]) * torch.tensor(STD[geometry])[:, None] * 255
    ).abs()


def normalised(patches: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    channels = patches.reshape(-1, 3, geometry.patch_size**2).float() / 255
    mean, std = torch.tensor(MEAN[geometry]), torch.tensor(STD[geometry])
    return (channels - mean[:, None]) / std[:, None]


def grid_of(image: torch.Tensor, geometry: Geometry) -> Grid:
    return geometry.grid(image.shape[1], image.shape[0])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("geometry", "size"), CASES, ids=str)
def test_patches_are_within_one_level_of_the_processors(geometry, size, mode):
    picture = Image.fromarray(pixels(size[0], size[1], 3)).convert(mode)
    image = torch.from_numpy(np.array(picture.convert("RGB")))
    expected, grid = by_processor(picture, geometry)
    (patches,) = to_patches([image], [grid_of(image, geometry)], PlainResize(geometry))
    assert list(grid_of(image, geometry)) == grid
    levels = level_differences(patches, expected, geometry)
    assert (levels < 1.01).float().mean() >= 0.999
    assert levels.max() < 2.01


@pytest.mark.parametrize(("geometry", "size"), CASES, ids=str)
def test_the_hardest_edges_equal_pillow_rows_first_exactly_or_within_one_level(geometry, size):
    width, height = size
    noise = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    resized = rows_first(Image.fromarray(noise), geometry.resized(width, height))
    expected, _ = by_processor(resized, geometry, do_resize=False)
    image, grid = torch.from_numpy(noise), geometry.grid(width, height)
    (exact,) = exact_patches(image[None], grid, geometry)
    assert level_differences(exact, expected, geometry).max() < 0.001
    (patches,) = to_patches([image], [grid], PlainResize(geometry))
    assert (level_differences(patches, expected, geometry) < 1.01).float().mean() >= 0.999


@pytest.mark.parametrize("size", [(900, 1000), (720, 1280), (500, 400)], ids=str)
def test_exact_patches_of_photos_are_within_two_levels_of_pillow_in_its_own_order(size):
    """Pillow resizes columns first where that takes less work, since its version 13."""
    image = torch.from_numpy(pixels(size[0], size[1], 3))
    expected, _ = by_processor(Image.fromarray(image.numpy()), QWEN3_VL)
    (patches,) = exact_patches(image[None], grid_of(image, QWEN3_VL), QWEN3_VL)
    levels = level_differences(patches, expected, QWEN3_VL)
    assert levels.max() < 2.01
    assert (levels < 1.01).float().mean() >= 0.999


@pytest.mark.parametrize("geometry", [QWEN3_VL, QWEN25_VL], ids=["patch 16", "patch 14"])
def test_without_resizing_patches_equal_the_processors_exactly(geometry):
    width, height = 13 * geometry.factor, 9 * geometry.factor
    image = torch.from_numpy(pixels(width, height, 5))
    (patches,) = to_patches([image], [grid_of(image, geometry)], PlainResize(geometry))
    expected, _ = by_processor(Image.fromarray(image.numpy()), geometry)
    for slot in (0, 1):
        assert torch.allclose(normalised(patches, geometry), expected[:, :, slot], rtol=0, atol=1e-6)


def test_patches_are_the_same_bits_alone_and_in_any_batch():
    images = [
        torch.from_numpy(pixels(w, h, n))
        for n, (w, h) in enumerate([(300, 200)] * 3 + [(200, 300), (90, 90)])
    ]
    grids = [grid_of(image, QWEN3_VL) for image in images]
    alone = [to_patches([image], [grid], RESIZE)[0] for image, grid in zip(images, grids, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 3, 0, 1], [1, 1]):
        together = to_patches([images[n] for n in order], [grids[n] for n in order], RESIZE)
        assert all(torch.equal(a, alone[n]) for a, n in zip(together, order, strict=True))


def test_images_of_one_size_and_grid_share_a_call_within_its_memory():
    small, large = torch.zeros(300, 400, 3, dtype=torch.uint8), torch.zeros(2000, 3000, 3, dtype=torch.uint8)
    images = [small, large, small, large, large, small]
    grids = [grid_of(image, QWEN3_VL) for image in images]
    grids[5] = grid_of(small, QWEN3_VL.variant(max_pixels=70_000))
    assert list(_calls(images, grids, together=True)) == [[0, 2], [1, 3], [4], [5]]
    assert list(_calls(images, grids, together=False)) == [[n] for n in range(6)]


def test_a_shared_call_gives_the_same_bits_as_single_calls():
    images = [torch.from_numpy(pixels(300, 200, n)) for n in range(3)]
    grid = grid_of(images[0], QWEN3_VL)
    for patches, image in zip(RESIZE.to_patches(torch.stack(images), grid), images, strict=True):
        assert torch.equal(patches, to_patches([image], [grid], RESIZE)[0])


def test_one_image_may_have_two_grids_in_one_call():
    image = torch.from_numpy(pixels(500, 400, 1))
    geometries = [QWEN3_VL, QWEN3_VL.variant(max_pixels=100_000)]
    grids = [grid_of(image, geometry) for geometry in geometries]
    for patches, grid in zip(to_patches([image, image], grids, RESIZE), grids, strict=True):
        assert patches.shape[0] == grid.patches


def test_no_images_give_no_patches():
    assert to_patches([], [], RESIZE) == []


@pytest.mark.gpu
def test_gpu_patches_are_within_one_level_and_equal_in_any_batch():
    images = [
        torch.from_numpy(pixels(w, h, n)) for n, (w, h) in enumerate([(300, 200)] * 3 + [(1280, 720)] * 20)
    ]
    grids = [grid_of(image, QWEN3_VL) for image in images]
    on_gpu = [image.cuda() for image in images]
    together = to_patches(on_gpu, grids, RESIZE)
    on_cpu = to_patches(images, grids, RESIZE)
    for image, grid, patches, reference in zip(on_gpu, grids, together, on_cpu, strict=True):
        assert patches.is_cuda
        assert torch.equal(patches, to_patches([image], [grid], RESIZE)[0])
        levels = (patches.cpu().int() - reference.int()).abs()
        assert (levels <= 1).float().mean() >= 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("size", [(4000, 4000, 1), (2000, 2000, 4), (9000, 9000, 1)])
@pytest.mark.cuda
def test_a_pixel_takes_no_more_device_memory_than_is_planned_for_it(size, kernels):
    width, height, count = size
    resize = make_resize(QWEN3_VL, torch.device("cuda:0")) if kernels else RESIZE
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    images = [torch.zeros(height, width, 3, dtype=torch.uint8, device="cuda") for _ in range(count)]
    to_patches(images, [grid_of(image, QWEN3_VL) for image in images], resize)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= RESIZED_BYTES_PER_PIXEL * width * height * count


def test_decoded_pixels_become_patches():
    image = torch.from_numpy(np.array(Image.open(io.BytesIO(photo(70, 50, 1)))))
    (patches,) = to_patches([image], [grid_of(image, QWEN3_VL)], RESIZE)
    assert patches.shape == (grid_of(image, QWEN3_VL).patches, 768)


@pytest.mark.parametrize(
    ("geometry", "kind"), [(QWEN3_VL, Qwen3VLVideoProcessor), (QWEN25_VL, Qwen2VLVideoProcessor)]
)
@pytest.mark.parametrize("size", [(320, 180), (640, 481), (97, 161)])
def test_patches_of_two_frames_equal_those_of_the_video_processor(geometry, kind, size):
    sizes = {"patch_size": geometry.patch_size, "merge_size": geometry.merge_size}
    levels = {"image_mean": MEAN[geometry], "image_std": STD[geometry]}
    processor = kind(**sizes, **levels, cap_pixels_per_frame=False)
    frames = torch.stack([torch.from_numpy(pixels(size[0], size[1], seed)) for seed in range(4)])
    made = processor(videos=[frames.permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt")
    t, h, w = made["video_grid_thw"][0].tolist()
    ours = torch.cat(to_patches([frames[:2], frames[2:]], [Grid(1, h, w)] * t, PlainResize(geometry)))
    slots = ours.view(len(ours), 3, 2, -1)
    expected = made["pixel_values_videos"].view_as(slots)
    for slot in range(2):
        made = normalised(slots[:, :, slot].flatten(1), geometry)
        assert torch.allclose(made, expected[:, :, slot], atol=1e-6)
    still = to_patches([frames[0]], [Grid(1, h, w)], PlainResize(geometry))[0]
    assert torch.equal(slots[: len(still), :, 0].flatten(1), still)


@pytest.mark.parametrize("size", [(252, 420), (56, 28), (28, 2800)])
def test_frames_resized_bilinearly_have_the_bytes_of_torchvision(size: tuple[int, int]) -> None:
    # Imported here, because machines that run this file's GPU tests may lack torchvision.
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    frames = torch.from_numpy(np.stack([pixels(160, 97, 1), pixels(160, 97, 2)]))
    truth = resize(frames.permute(0, 3, 1, 2), list(size), InterpolationMode.BILINEAR).permute(0, 2, 3, 1)
    grid = Grid(1, 4, 4)
    assert torch.equal(resize_bilinear(frames, Frames(0, 1, grid, size)), truth)
    for unchanged in (Frames(0, 1, grid), Frames(0, 1, grid, (97, 160))):
        assert resize_bilinear(frames, unchanged) is frames
