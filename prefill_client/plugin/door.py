"""The door of an engine: from the images and videos of a request to images that the service has.

An engine's plug-in finds the media in a request, and tells the engine what takes their place. The rest is here, once
for all engines: it loads files, selects the frames of videos, submits images, and names the medium in an error.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from encoder_contract.errors import EncoderError
from encoder_contract.video import Clip, VideoInfo, VideoSettings
from prefill_client.client import DEFAULT_TIMEOUT_S, EncoderClient
from prefill_client.fleet.submission import KeptImages
from prefill_client.images import File, Image, Submitted, raise_first, read_images, without_errors
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_client.media.local_files import LocalFolder
from prefill_client.plugin.service import connect
from prefill_client.plugin.service_settings import ServiceSettings
from prefill_client.transport.connection import Description
from prefill_client.video import Video, read_videos

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a video of a request. `name` is what error messages call it.

    An image has one file. A `video` has one for each pair of frames that the model is shown.
    """

    name: str
    files: Sequence[File]
    video: Video | None = None


def stills(files: Iterable[File]) -> list[Medium]:
    """Return the images of a request."""
    return [Medium(f"image {index}", [file]) for index, file in enumerate(files)]


def files_of(media: Iterable[Medium]) -> list[File]:
    """Return the files to submit."""
    return [file for medium in media for file in medium.files]


def names_of(media: Iterable[Medium]) -> list[str]:
    """Return the name of the medium of each file."""
    return [medium.name for medium in media for _ in medium.files]


def clips_of(media: Iterable[Medium]) -> list[Clip]:
    """Return the clips of all videos."""
    return [medium.video.clip for medium in media if medium.video is not None]


class Door:
    """Loads the media of requests and submits them by `client`. For one event loop."""

    def __init__(self, client: EncoderClient, *loaders: ImageLoader) -> None:
        """`loaders` load images and videos, one for each."""
        self.client = client
        self._loaders = {loader.what: loader for loader in loaders}

    @classmethod
    async def open(
        cls,
        settings: ServiceSettings,
        destinations: Destinations,
        *,
        files: LocalFolder | None = None,
        check: Callable[[Description], None] | None = None,
        fingerprint: bytes = b"",
    ) -> Self:
        """Connect an engine to the service, and load files of the sizes that the service accepts.

        URLs may name `destinations` and `files`. Raises the errors of `connect`, which uses `check` and `fingerprint`.
        """
        client = await connect(settings, wait=False, check=check, fingerprint=fingerprint)
        limits = {"image": client.description.max_image_bytes, "video": client.description.max_video_bytes}
        timeout_s = settings.submit_timeout_s
        loaders = (
            ImageLoader(destinations, max_bytes=limit, timeout_s=timeout_s, files=files, what=what)
            for what, limit in limits.items()
        )
        return cls(client, *loaders)

    async def close(self) -> None:
        """Close the connection."""
        await self.client.close()

    def for_tenant(self, tenant_salt: str) -> Self:
        """Return a door for another tenant, with the same connections and loaders."""
        return type(self)(self.client.for_tenant(tenant_salt.encode()), *self._loaders.values())

    async def load(self, what: str, sources: Sequence[str | bytes]) -> list[bytes]:
        """Return the files of all images or videos of a request, as `what` says. See `ImageLoader.load_all`."""
        return await self._loaders[what].load_all(sources)

    async def videos(
        self,
        files: Sequence[bytes],
        settings: VideoSettings,
        *,
        clip: Callable[[VideoInfo], Clip] | None = None,
        request_id: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Medium]:
        """Return the videos of a request, as `read_videos` reads them. Raises the error of the first that failed."""
        found = await read_videos(
            self.client, files, settings, request_id=request_id, timeout_s=timeout_s, clip=clip
        )
        names = [f"video {index}" for index in range(len(files))]
        videos = zip(names, without_errors(found, names), strict=True)
        return [Medium(name, video.images, video) for name, video in videos]

    async def read(self, media: Sequence[Medium]) -> list[Submitted]:
        """Return answers to the files of media that need no server, from their headers.

        An answer has no grid if only a server can compute it. Raises the error of the first file that is not an image.
        """
        files, places = _once(files_of(media), by=id)
        read = await asyncio.to_thread(read_images, files, self.client.description.geometry)
        images = without_errors([read[place] for place in places], names_of(media))
        return [Submitted(image.digest, image.grid, image.tokens, frames=image.frames) for image in images]

    async def submit(
        self, media: Sequence[Medium], *, request_id: str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Submitted]:
        """Submit the files of media. Return the service's answers. Raises the error of the first that failed."""
        answers = await self.client.submit(files_of(media), request_id=request_id, timeout_s=timeout_s)
        raise_first([answer.error for answer in answers], names_of(media))
        return answers

    async def keep(
        self,
        media: Sequence[Medium],
        *,
        request_id: str,
        priority: int = 0,
        timeout_s: float,
        again_s: float,
    ) -> KeptImages:
        """Submit the files of media, and keep them submitted as `EncoderClient.keep` does.

        A file that several media share is submitted once. Raises the error of the first that failed; no image is then
        kept.
        """
        files, places = _once(files_of(media), by=id)
        kept = await self.client.keep(
            files, request_id=request_id, priority=priority, timeout_s=timeout_s, again_s=again_s
        )
        return await _answered(kept, places, names_of(media))

    async def keep_known(
        self,
        images: Sequence[Image],
        names: Sequence[str],
        *,
        request_id: str,
        priority: int = 0,
        timeout_s: float,
        again_s: float,
    ) -> KeptImages:
        """Keep images that another process has submitted, as `EncoderClient.keep_known` does, each of them once.

        `names` are what error messages call them. Raises the error of the first that failed; no image is then kept.
        """
        distinct, places = _once(images, by=lambda image: image.name)
        kept = await self.client.keep_known(
            distinct, request_id=request_id, priority=priority, timeout_s=timeout_s, again_s=again_s
        )
        return await _answered(kept, places, names)


def _once(items: Sequence[Item], by: Callable[[Item], Hashable]) -> tuple[list[Item], list[int]]:
    """Return the items without those that equal an earlier one `by` this key, and where each item is among them.

    A request can name one image many times in few bytes.
    """
    distinct: dict[Hashable, tuple[int, Item]] = {}
    places = [distinct.setdefault(by(item), (len(distinct), item))[0] for item in items]
    return [item for _, item in distinct.values()], places


async def _answered(kept: KeptImages, places: Sequence[int], names: Sequence[str]) -> KeptImages:
    """Return kept images with an answer for each of `names`, of the image at its place."""
    kept.answers = [kept.answers[place] for place in places]
    try:
        raise_first([answer.error for answer in kept.answers], names)
    except EncoderError:
        await kept.close()
        raise
    return kept
