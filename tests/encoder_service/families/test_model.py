"""`CountedRows` and `OneByOne`: the parts of a model that every family shares."""

import threading

import pytest
import torch

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.geometry import Grid
from encoder_service.families.counted_rows import MAX_ROWS, CountedRows
from encoder_service.families.model import LoadOptions, OneByOne
from encoder_service.keys import Recipe

OPTIONS = LoadOptions(device="cpu", dtype="float32")


def test_a_size_is_counted_once_and_then_cached():
    asked = []

    def count(width, height):
        asked.append((width, height))
        return Grid(1, height // 10, width // 10)

    rule = CountedRows(count)
    assert not rule.at_once(40, 30)
    assert rule.grid(40, 30) == Grid(1, 3, 4)
    assert rule.at_once(40, 30)
    assert rule.grid(40, 30) == Grid(1, 3, 4)
    assert asked == [(40, 30)]
    assert rule.tokens(Grid(1, 3, 4)) == 12


@pytest.mark.parametrize("rows", [0, -1, MAX_ROWS + 1])
def test_a_size_whose_rows_cannot_be_served_is_refused(rows):
    with pytest.raises(InvalidImageError, match=f"has {rows} rows"):
        CountedRows(lambda _w, _h: Grid(1, rows, 1)).grid(10, 20)


def test_an_error_of_the_family_refuses_the_size_and_is_cached():
    asked = []

    def count(width, height):
        asked.append((width, height))
        raise KeyError("longest_edge")

    rule = CountedRows(count)
    for _ in range(2):
        with pytest.raises(InvalidImageError, match=r"image of 10x20 pixels: KeyError: 'longest_edge'"):
            rule.grid(10, 20)
    assert len(asked) == 1


def test_only_grids_of_rows_exist_and_no_variants():
    rule = CountedRows(lambda _w, _h: Grid(1, 1, 1))
    assert rule.has(Grid(1, 7, 1))
    assert rule.has(Grid(1, 7, 2))
    assert rule.variant() is rule
    for grid in (Grid(2, 7, 1), Grid(1, 0, 1), Grid(1, 7, 0), Grid(1, MAX_ROWS + 1, 1), Grid(1, MAX_ROWS, 2)):
        assert not rule.has(grid)
    with pytest.raises(ImageLimitError, match="no variants"):
        rule.variant(max_pixels=1 << 16)


class Averages(OneByOne):
    """Makes one row for each 10 lines of pixels: their mean."""

    def __init__(self, options=OPTIONS, **changed):
        super().__init__(
            options, model_type="averages", hidden=3, recipe=Recipe(bytes(32), bytes(32), options.dtype)
        )
        self.threads = set()
        self.__dict__.update(changed)

    def rows(self, width, height):
        return height // 10

    def prepare_image(self, pixels):
        if pixels.shape[1] == 13:
            raise KeyError("thirteen")
        return pixels.float()

    def encode_image(self, inputs):
        self.threads.add(threading.current_thread())
        return inputs[: len(inputs) // 10 * 10].view(-1, 10, inputs.shape[1], 3).mean(dim=(1, 2))


def image(width, height):
    return torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def test_images_are_encoded_one_by_one_with_others_between():
    model = Averages()
    pixels = [image(20, 30), image(40, 90)]
    grids = [model.geometry.grid(each.shape[1], each.shape[0]) for each in pixels]
    calls = []
    rows = model.encode(model.inputs(pixels, grids), grids, lambda: calls.append(model.eager_batches))
    assert [each.shape for each in rows] == [(3, 3), (9, 3)]
    assert calls == [0, 1]
    for each, grid, made in zip(pixels, grids, rows, strict=True):
        [alone] = model.encode(model.inputs([each], [grid]), [grid])
        assert torch.equal(alone, made)


def test_an_image_on_which_the_processor_fails_is_invalid_alone():
    model = Averages()
    with pytest.raises(InvalidImageError, match=r"refuses an image of 13x20 pixels: KeyError: 'thirteen'"):
        model.inputs([image(13, 20)], [Grid(1, 2, 1)])


def test_memory_that_runs_out_is_not_the_images_fault():
    def full(_pixels):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Averages(prepare_image=full).inputs([image(20, 20)], [Grid(1, 2, 1)])


def test_a_wrong_number_of_rows_is_refused():
    model = Averages(encode_image=lambda _: torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"made \(5, 3\) .* promised \(2, 3\)"):
        model.encode(model.inputs([image(20, 20)], [Grid(1, 2, 1)]), [Grid(1, 2, 1)])


def test_a_model_with_wrong_row_counts_is_refused_at_start():
    Averages().warm_up()
    with pytest.raises(ValueError, match="promised"):
        Averages(encode_image=lambda _: torch.zeros(1, 3)).warm_up()


def test_the_attention_of_the_servers_own_towers_is_refused():
    with pytest.raises(ValueError, match=r"no tower of its own .*: leave out --attention"):
        Averages(LoadOptions(device="cpu", dtype="bfloat16", attention="sdpa"))
