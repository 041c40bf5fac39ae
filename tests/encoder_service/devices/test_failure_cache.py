"""Images that cannot be encoded are remembered: damaged files for all variants, too large ones for that variant."""

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.header import read_header
from encoder_service.devices.job_queue import FailureCache
from encoder_service.devices.model import Model
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from testing.photos import photo
from tests.device_bench import demanded, running

FULL, SMALL = (
    ImageKey(address * 32, b"d" * 32, max_pixels=most) for address, most in ((b"f", 0), (b"s", 4096))
)


def test_a_damaged_file_fails_in_every_variant() -> None:
    failures = FailureCache()
    failures.note(FULL, InvalidImageError("damaged"))
    for key in (FULL, SMALL):
        with pytest.raises(InvalidImageError, match="damaged"):
            failures.check(key)


def test_an_image_too_large_in_one_variant_is_not_in_another() -> None:
    failures = FailureCache()
    failures.note(FULL, ImageLimitError("too large"))
    failures.check(SMALL)
    with pytest.raises(ImageLimitError, match="too large"):
        failures.check(FULL)


async def test_an_image_too_large_for_the_store_fits_in_a_smaller_variant(model: Model) -> None:
    file = photo(640, 640, 7)
    geometry, recipe = model.tower.geometry, model.recipe
    small = geometry.variant(max_pixels=256 * 256)
    row_bytes = model.tower.width * model.tower.dtype.itemsize
    tokens = geometry.tokens(geometry.grid(640, 640))
    async with running(model, host_bytes=max(tokens * row_bytes // 2, 1 << 16)) as bench:
        with pytest.raises(ImageLimitError, match="--store-host-gib"):
            await bench.rows(file, demanded("full"))
        key, claim = recipe.key(content_digest(file), max_pixels=256 * 256), demanded("small")
        assert bench.jobs.join(key, claim) is None, "nothing is remembered of this variant"
        grid, header = small.grid(640, 640), read_header(file)
        job = bench.jobs.submit(key, Source(key.source_key, file, header), grid, claim)
        assert job is not None
        (await bench.jobs.wait(job, claim)).release()
        with pytest.raises(ImageLimitError, match="--store-host-gib"):
            bench.jobs.join(recipe.key(content_digest(file)), demanded("full again"))
