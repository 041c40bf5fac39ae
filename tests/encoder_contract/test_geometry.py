"""Geometry: the grid and token count of an image, equal to what `transformers` computes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.geometry import Geometry, Grid

QWEN3_VL = Geometry(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
QWEN25_VL = Geometry(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=12845056)
TIGHT = Geometry(patch_size=14, merge_size=2, min_pixels=200704, max_pixels=1003520)
GEOMETRIES = [QWEN3_VL, QWEN25_VL, TIGHT]

EXTREMES = [
    (1, 1), (1, 200), (200, 1), (2, 400), (3, 599), (7, 1400), (13, 17), (14, 14), (15, 15),
    (16, 16), (31, 33), (42, 42), (48, 48), (80, 48), (1, 100), (100, 20000), (65535, 65535),
    (65535, 328), (30000, 150), (4096, 4096), (4097, 4096), (4095, 4097), (256, 256), (255, 257),
    (56, 56), (55, 57), (12000, 9000), (1280, 720), (1920, 1080), (2560, 1440), (960, 1280),
    (560, 560),
]  # fmt: skip


def sizes_of_photos(count: int) -> list[tuple[int, int]]:
    draw = random.Random(20)
    sizes: list[tuple[int, int]] = []
    while len(sizes) < count:
        width, height = (int(2 ** draw.uniform(0, 14)) for _ in range(2))
        if max(width, height) <= 200 * min(width, height):
            sizes.append((width, height))
    return sizes


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["qwen3_vl", "qwen2_5_vl", "tight"])
def test_sizes_grids_and_tokens_equal_the_processors(geometry):
    for width, height in sizes_of_photos(10_000) + EXTREMES:
        expected = smart_resize(height, width, geometry.factor, geometry.min_pixels, geometry.max_pixels)
        assert geometry.resized(width, height) == expected[::-1], (width, height)
    processor = Qwen2VLImageProcessorPil(
        patch_size=geometry.patch_size,
        merge_size=geometry.merge_size,
        size={"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels},
    )
    for width, height in sizes_of_photos(2_000) + EXTREMES:
        grid = geometry.grid(width, height)
        patches = processor.get_number_of_image_patches(height, width, {})
        assert grid.patches == patches
        assert geometry.tokens(grid) * 4 == patches
        sides = (side // geometry.patch_size for side in geometry.resized(width, height))
        assert grid == (1, *reversed([*sides]))


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (65535, 327)])
def test_strips_longer_than_200_to_1_are_refused_naming_the_limit(size):
    with pytest.raises(ImageLimitError, match=r"aspect ratio .* exceeds 200"):
        QWEN3_VL.grid(*size)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (-1, 5)])
def test_an_image_with_a_zero_side_is_refused(size):
    with pytest.raises(InvalidImageError):
        QWEN3_VL.grid(*size)


def test_a_variant_narrows_the_budget_like_the_processor_would():
    small = QWEN3_VL.variant(max_pixels=262_144)
    for width, height in sizes_of_photos(500):
        assert small.resized(width, height) == smart_resize(height, width, 32, 65536, 262_144)[::-1]
    assert QWEN3_VL.variant() == QWEN3_VL
    assert QWEN3_VL.variant(min_pixels=131_072).grid(10, 10).patches * 256 >= 131_072


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"max_pixels": 16777217}, "exceeds the model's max_pixels 16777216"),
        ({"min_pixels": 16777217}, "min_pixels 16777217"),
        ({"max_pixels": 65535}, "min_pixels 65536"),
        ({"min_pixels": 5, "max_pixels": 4}, "min_pixels 5"),
    ],
)
def test_a_variant_outside_the_models_budget_is_refused_naming_the_bound(bounds, named):
    with pytest.raises(ImageLimitError, match=named):
        QWEN3_VL.variant(**bounds)


@pytest.mark.parametrize(
    ("name", "value"), [("patch_size", 0), ("merge_size", 0), ("min_pixels", 0), ("max_pixels", 65535)]
)
def test_an_invalid_geometry_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        replace(QWEN3_VL, **{name: value})


@given(
    st.integers(1, 64),
    st.integers(1, 4),
    st.integers(1, 1 << 24),
    st.floats(0, 1),
    st.integers(1, 1 << 17),
    st.floats(1, 200),
    st.booleans(),
)
@settings(max_examples=2000, deadline=None)
def test_no_image_of_any_variant_has_more_tokens_than_the_bound(
    patch_size, merge_size, max_pixels, share, short, ratio, upright
):
    geometry = Geometry(patch_size, merge_size, 1, max_pixels)
    variant = geometry.variant(min_pixels=max(1, int(share * max_pixels)))
    long = min(int(short * ratio), 200 * short)
    grid = variant.grid(short, long) if upright else variant.grid(long, short)
    assert geometry.tokens(grid) <= geometry.max_tokens
    assert geometry.has(grid)
    assert variant.has(grid)


@pytest.mark.parametrize(
    "grid",
    [(1, 0, 0), (1, 3, 20), (1, 20, 3), (2, 20, 20), (0, 20, 20), (1, 2**32 - 2, 2**32 - 2), (1, 512, 512)],
)
def test_an_impossible_grid_is_recognised(grid):
    assert not QWEN3_VL.has(Grid(*grid))
