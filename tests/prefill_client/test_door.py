"""The door of every engine: media of a request become images that the service has, and errors name their medium."""

from dataclasses import replace
from pathlib import Path

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import InvalidImageError, ModelMismatchError
from encoder_contract.video import VideoSettings
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import Description, EncoderClient, Image, read_images
from prefill_client.media.destinations import Destinations
from prefill_client.plugin.door import Door, clips_of, stills
from prefill_client.plugin.service_settings import ServiceSettings
from testing.answers import data_url
from testing.clips import clip
from testing.photos import photo
from tests.gate import Gate
from tests.operator_view import numbers
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

GOOD, OTHER, BAD = photo(90, 60, 71), photo(60, 90, 72), b"no image"
PATIENT = {"timeout_s": PATIENCE_S, "again_s": PATIENCE_S}
SETTINGS = ServiceSettings(("unused",), submit_timeout_s=PATIENCE_S)


async def test_the_media_of_a_request_are_submitted_in_its_order(server: Server, checkpoint: Path) -> None:
    """The calls of a plug-in, from URLs to names."""
    door = await Door.open(replace(SETTINGS, endpoints=(server.endpoint,)), Destinations(()))
    files = await door.load("image", [data_url(GOOD), GOOD])
    clips = await door.load("video", [data_url(clip("mp4"))])
    videos = await door.videos(clips, VideoSettings.from_folder(checkpoint), timeout_s=PATIENCE_S)
    media = [*stills(files), *videos]
    assert [medium.name for medium in media] == ["image 0", "image 1", "video 0"]
    (shown,) = clips_of(media)
    async with await door.for_tenant("a").keep(media, request_id="x", **PATIENT) as kept:
        assert [answer.digest for answer in kept.answers[:2]] == [content_digest(GOOD)] * 2
        assert [answer.frames for answer in kept.answers[2:]] == [*shown.pairs]
    await door.close()


async def test_an_image_that_a_request_shows_again_is_submitted_once(
    server: Server, client: EncoderClient
) -> None:
    shown = [GOOD, OTHER, GOOD, OTHER, GOOD]
    door, before = Door(client), (await numbers(server)).total("submitted_images_total")
    kept = await door.keep(stills(shown), request_id="x", **PATIENT)
    digests = [content_digest(each) for each in shown]
    assert [answer.digest for answer in kept.answers] == digests
    assert [answer.digest for answer in await door.read(stills(shown))] == digests
    assert (await numbers(server)).total("submitted_images_total") == before + 2
    (image,) = read_images([GOOD], client.description.geometry)
    assert isinstance(image, Image)
    known = await door.keep_known([image, image], ["image 0", "image 1"], request_id="y", **PATIENT)
    assert [answer.digest for answer in known.answers] == [content_digest(GOOD)] * 2
    await known.close()
    await kept.close()
    with pytest.raises(InvalidImageError, match="image 2: not an image"):
        await door.keep(stills([GOOD, GOOD, BAD]), request_id="z", **PATIENT)


async def test_an_error_names_the_image_at_fault(client: EncoderClient) -> None:
    with pytest.raises(InvalidImageError, match="image 1: not an image") as raised:
        await Door(client).submit(stills([GOOD, BAD]), request_id="x", timeout_s=PATIENCE_S)
    assert raised.value.image == 1


async def test_after_an_error_no_image_of_the_request_is_kept(
    config: Config, model: Model, gate: Gate
) -> None:
    gated = replace(model, decoder=gate)  # type: ignore[arg-type]
    async with server_of(config, gated) as server, await EncoderClient.connect(server.endpoint) as client:
        with gate.closed():
            with pytest.raises(InvalidImageError, match="image 1: not an image"):
                await Door(client).keep(stills([GOOD, BAD]), request_id="x", **PATIENT)
            await soon(lambda: len(server.jobs) == 0)


async def test_an_error_names_the_video_at_fault(client: EncoderClient, checkpoint: Path) -> None:
    with pytest.raises(InvalidImageError, match="video 1: "):
        await Door(client).videos([clip("mp4"), BAD], VideoSettings.from_folder(checkpoint))


async def test_a_door_to_a_service_of_another_model_stays_closed(server: Server) -> None:
    def check(_: Description) -> None:
        raise ValueError("another model")

    with pytest.raises(ModelMismatchError, match="another model"):
        await Door.open(replace(SETTINGS, endpoints=(server.endpoint,)), Destinations(()), check=check)
