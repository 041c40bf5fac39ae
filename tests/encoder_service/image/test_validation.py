"""Validation: one caller's many or bad uploads do not delay those of another."""

import asyncio

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import DigestMismatchError
from encoder_contract.geometry import Geometry
from encoder_service.image import sources
from encoder_service.image.source import Source
from encoder_service.image.sources import THREADS, Validator, VideoLimits
from encoder_service.keys import ImageKey
from testing.decoding import pillow_decoder
from testing.photos import photo

GEOMETRY = Geometry(16, 2, 65536, 16777216)
UPLOADS = 40


def new_validator() -> Validator:
    return Validator(
        GEOMETRY,
        max_image_bytes=1 << 25,
        max_image_pixels=1 << 25,
        read_rare_header=pillow_decoder().files.read_header,
        open_video=pillow_decoder().files.open_video,
        video_limits=VideoLimits(100, 100.0),
    )


@pytest.mark.attack("many uploads with wrong digests")
async def test_uploads_with_wrong_digests_do_not_delay_another_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The order in which several threads finish is up to the system.
    monkeypatch.setattr(sources, "THREADS", 1)
    validator, image = new_validator(), photo(300, 200, 1)
    order: list[str] = []

    async def take(caller: str, data: bytes, digest: bytes) -> None:
        (checked,) = await validator.validate([(ImageKey(bytes(32), digest), data)], caller)
        assert isinstance(checked, Source if caller == "victim" else DigestMismatchError)
        order.append(caller)

    wrong = [take("attacker", bytes(1 << 20), bytes(32)) for _ in range(UPLOADS)]
    await asyncio.gather(*wrong, take("victim", image, content_digest(image)))
    assert len(order) == UPLOADS + 1
    # One upload has the thread when the victim's arrives, and its caller has the next turn too.
    assert order.index("victim") == 2


async def test_a_cancelled_upload_leaves_its_turn_to_the_next() -> None:
    validator, image = new_validator(), photo(300, 200, 1)
    key = ImageKey(bytes(32), content_digest(image))
    takes = [asyncio.create_task(validator.validate([(key, image)], "a")) for _ in range(4 * THREADS)]
    await asyncio.sleep(0)
    for each in takes[:-1]:
        each.cancel()
    for checked in (await takes[-1], await validator.validate([(key, image)], "b")):
        assert [source.data for source in checked if isinstance(source, Source)] == [image]
