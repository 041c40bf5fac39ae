"""The images of requests at the encoder service: the middleware submits them here, and gets names in their place.

There is one connection for each API server, to a service that has the engine's vision weights.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypedDict

from cachetools import LRUCache
from vllm import envs
from vllm.tokenizers import cached_tokenizer_from_config

from encoder_contract.errors import (
    EncoderError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
    UnknownImageError,
)
from encoder_contract.geometry import Geometry
from encoder_contract.video import Clip, VideoSettings
from prefill_client.fleet.submission import KeptImages
from prefill_client.images import File, Submitted
from prefill_client.media.destinations import Destinations
from prefill_client.media.local_files import LocalFolder
from prefill_client.plugin.door import Door, Medium, clips_of, files_of, names_of, stills
from prefill_client.plugin.service import WatchedClient
from prefill_client.transport.connection import traceparent
from prefill_client.vllm.guarded_request import FindFailed, failed_image, first_encoded
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo, producer_of, salt_of
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.parts import template_text
from prefill_client.vllm.request_images import NamedImage, RequestImages, blank_url, size_of
from prefill_client.vllm.row_fetcher import NEW_WEIGHTS
from prefill_client.vllm.service_check import check_description, check_limits, engine_model, video_settings
from prefill_client.vllm.stored_responses import MAX_STORED_BYTES, Conversation, StoredResponses
from prefill_client.vllm.token_requests import ContentParts, TokenRequest, image_of
from prefill_client.vllm.videos import (
    OPTIONS,
    Sampling,
    UnsupportedVideoError,
    VideoTokenCounts,
    prompt_parts,
)
from prefill_client.vllm.vllm_settings import VllmSettings
from prefill_client.vllm.weight_updates import QUERY

_log = logging.getLogger("vllm.encoder_service")
# Text before the first image that is worth a prefill step. A request with less of it reaches vLLM when its first image
# is encoded. In the engine it would wait in steps that run nothing: few, if the engine can sleep (`parking.py`).
WORTH_PREFILLING_TOKENS = 512
WORTH_PREFILLING_BYTES = 4 * WORTH_PREFILLING_TOKENS
_UNKNOWN_WEIGHTS = (
    "an update wrote unknown vision weights into the engine: the encoder service encodes no images until an update has "
    'named every vision tensor, or the engine restarts. If the vision weights never change, set "model_fingerprint": '
    '"any"'
)


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A body with names instead of images, those images, and a function that finds the one that failed.

    `videos` is None if the answer does not show the tokens of videos. `first_encoded` waits for the first image; None:
    vLLM has something to do before. `renders_only`: if vLLM answers, the images stay submitted.
    """

    body: bytes
    kept: KeptImages
    find_failed: FindFailed
    videos: VideoTokenCounts | None = None
    first_encoded: FindFailed | None = None
    renders_only: bool = False


class _Patience(TypedDict):
    """What the service is told of a request that submits images, and how long it may take."""

    request_id: str
    priority: int
    timeout_s: float
    again_s: float


class ImageService:
    """The middleware's connection to the encoder service: opened at the first image, and again if that failed."""

    def __init__(self, vllm_config: Any, args: Any, engine: Any) -> None:
        """`args` are those of the command, and `engine` is vLLM's client of the engine; a render server has none."""
        config = vllm_config.ec_transfer_config or getattr(args, "ec_transfer_config", None)
        if config is None:
            raise RuntimeError("the middleware needs EncoderServiceConnector in --ec-transfer-config")
        self.settings = VllmSettings.read(config.ec_connector_extra_config)
        self._config = vllm_config
        self.signer = NameSigner(read_name_key(self.settings.name_key_file))
        self._content_format = getattr(args, "chat_template_content_format", "auto")
        self._chat_template = template_text(getattr(args, "chat_template", ""))
        self._trusts_options = getattr(args, "trust_request_mm_kwargs", False)
        self._shows_tokens = getattr(args, "enable_prompt_tokens_details", False)
        folder = getattr(args, "allowed_local_media_path", "") or ""
        self._open_door = partial(
            Door.open,
            self.settings,
            Destinations(getattr(args, "allowed_media_domains", None) or ()),
            files=LocalFolder(folder, "--allowed-local-media-path"),
        )
        self._engine = engine
        self._weights: str | None = ""  # as the engine core tells them
        self._doubts_weights = False
        self._asking = asyncio.Lock()
        self._door = WatchedClient(self._connect, _log)
        self._video_settings: VideoSettings | None = None
        self._responses = StoredResponses()
        self._by_uuid: LRUCache[tuple[str, str], bytes] = LRUCache(MAX_STORED_BYTES, getsizeof=len)

    @property
    def has_tower(self) -> bool:
        """Whether the engine has loaded its own tower for images."""
        return bool(self._config.model_config.multimodal_config.get_limit_per_prompt("image"))

    async def _connect(self) -> Door:
        """Connect to a service with the engine's vision weights."""
        engine = replace(engine_model(self._config), fingerprint=bytes.fromhex(self._weights or ""))
        check = partial(check_description, self.settings, self._config, engine)
        return await self._open_door(check=check, fingerprint=engine.fingerprint or b"")

    def doubt_weights(self) -> None:
        """Note that the engine may have other weights now: before the next image is submitted, it is asked."""
        self._doubts_weights = not self.settings.takes_any_model

    async def _ask_for_weights(self) -> None:
        """Ask the engine which vision weights it has, and connect to another service if they are others."""
        self._doubts_weights = False
        if self._engine is None:
            return
        try:
            told, *_ = await self._engine.collective_rpc(QUERY)
        except Exception:  # noqa: BLE001 - vLLM answers for an engine that has died
            _log.warning("the engine does not tell its vision weights", exc_info=True)
            told = None
        if told != self._weights:
            self._weights = told
            self._door.reopen()

    def earlier(self, images: RequestImages | ContentParts) -> Conversation:
        """Return the images of the response that a request continues; they come first in its prompt."""
        return self._responses.conversation(images.previous_response)

    async def geometry(self) -> Geometry | None:
        """Return how the model's images are laid out; None if only the service can count their rows."""
        return (await self._open(self.settings.tenant_salt)).client.description.geometry

    async def content_parts(self, body: dict[str, Any]) -> ContentParts | None:
        """Return the images of `content_parts`; None if there are none, or if the engine's own tower encodes them."""
        token = getattr(self._config.model_config.hf_config, "image_token_id", None)
        if not body.get("content_parts") or (geometry := await self.geometry()) is None:
            return None
        parts = ContentParts(body, token, geometry, self._config.model_config.max_model_len)
        check_limits(self._config, images=len(parts), videos=0)
        return parts if len(parts) else None

    async def keep(self, request: TokenRequest, info: RequestInfo) -> NamedRequest:
        """Keep the images of a rendered request submitted by their names, and let vLLM lay out these.

        Raises `ForbiddenError` for an image of another tenant, and `LostImageError` for one that no server has.
        """
        salt = _salt(self.settings, request.body)
        door = await self._open(salt)
        weights = self._weights
        if (geometry := door.client.description.geometry) is None:
            raise InvalidRequestError("images of this model cannot have names in a request of tokens")
        request.check(producer_of(door.client.description, salt), geometry)
        info = replace(info, traceparent=info.traceparent or request.info.traceparent)
        labels = [f"image {index}" for index in request.images]
        sent = dict(enumerate(request.info.submitted_to))
        images = [image_of(name, geometry, sent.get(index, "")) for index, name in request.images.items()]
        with _traced(info.traceparent):
            if self._is_decode_leg(request.body):
                kept = await self._keep(door, [], info)
                answers = [Submitted(each.digest, each.grid, frames=each.frames) for each in images]
            else:
                kept = await door.keep_known(images, labels, **self._patience(info))
                answers = kept.answers
        try:
            by_index = dict(zip(request.images, answers, strict=True))
            told = self._told(info, by_index, list(request.images.values()))
            request.write(told)
            body = _encoded(request.body)
        except BaseException:
            await kept.close()
            raise
        holds = request.begins_with_image(WORTH_PREFILLING_TOKENS) and bool(kept.answers)
        first = self._first(door, labels, answers, info) if holds else None
        return NamedRequest(
            body, kept, self._find_failed(door, weights, labels, answers, info), first_encoded=first
        )

    async def submit(
        self, images: RequestImages | ContentParts, info: RequestInfo, *, renders_only: bool = False
    ) -> NamedRequest:
        """Submit a request's images and replace them by names; raise the error of the first that failed.

        `info` has the caller's fields for the service. Also submits the images of the response that the request
        continues, if their files are still kept. With `renders_only`, the images stay submitted if vLLM answers.
        """
        salt, earlier = _salt(self.settings, images.body), self.earlier(images)
        self._check(images, earlier, salt)
        door = await self._open(salt)
        weights = self._weights
        if earlier.digests and earlier.weights != weights:
            raise UnknownImageError(
                "previous_response_id: the engine's vision weights have changed since: send the conversation with its "
                "images, without previous_response_id"
            )
        needs_rows = not (self._is_decode_leg(images.body) or (renders_only and self.settings.scores_only))
        with _traced(info.traceparent):
            media = await self._media(images, door, info.request_id, salt)
            lays_out = door.client.description.geometry is None
            stand_ins = await asyncio.to_thread(_stand_ins, media) if lays_out else {}
            continued = self._responses.media(earlier)
            unsent = [] if needs_rows else await _read(door, [*continued, *media])
            kept = await self._keep(door, [] if unsent else [*continued, *media], info)
        try:
            remaining = iter(unsent or kept.answers)
            answers = [*earlier.answers(continued, remaining), *remaining]
            producer = producer_of(door.client.description, salt)
            new = [_name(answer, producer) for answer in answers[len(continued) :]]
            named = self._named(media, iter(new), stand_ins, seal=images.loses_parameters)
            names = (*earlier.names, *new)
            images.replace([*map(_parts, media, named)], self._told(info, dict(enumerate(answers)), names))
            if not renders_only:
                digests = tuple(answer.digest for answer in answers)
                self._store(images, Conversation(digests, names, salt, weights), files_of(media))
            body = _encoded(images.body)
            tokens = self._video_tokens(clips_of(media))
        except BaseException:  # else the images would stay submitted
            await kept.close()
            raise
        labels = [*(medium.name for medium in continued), *names_of(media)]
        needed = [] if renders_only else answers  # without rows, vLLM fails for another reason
        find_failed = self._find_failed(
            door, weights, labels[: len(needed)], needed, info, continues=bool(earlier.digests)
        )
        begins_with_image = 0 <= body.find(self.signer.identifier(names[0]).encode()) < WORTH_PREFILLING_BYTES
        holds = begins_with_image and not (unsent or renders_only)
        first = self._first(door, labels, answers, info) if holds else None
        return NamedRequest(body, kept, find_failed, tokens, first, renders_only)

    def _store(
        self, images: RequestImages | ContentParts, conversation: Conversation, new: Sequence[File]
    ) -> None:
        """Remember the images up to a response, if vLLM will store it. The last of them have the files `new`."""
        if envs.VLLM_ENABLE_RESPONSES_API_STORE and (response_id := images.stored_as()):
            self._responses.add(response_id, conversation, new)

    async def _open(self, salt: str) -> Door:
        """Return the door of a tenant. Raises `ModelMismatchError` while nobody knows the engine's vision weights."""
        async with self._asking:
            if self._doubts_weights:
                await self._ask_for_weights()
        if self._weights is None:
            raise ModelMismatchError(_UNKNOWN_WEIGHTS)
        return (await self._door.get()).for_tenant(salt)

    async def _keep(self, door: Door, media: Sequence[Medium], info: RequestInfo) -> KeptImages:
        return await door.keep(media, **self._patience(info))

    def _patience(self, info: RequestInfo) -> _Patience:
        return _Patience(
            request_id=info.request_id,
            priority=info.priority,
            timeout_s=self.settings.submit_timeout_s,
            again_s=self._again_s,
        )

    def _is_decode_leg(self, body: dict[str, Any]) -> bool:
        """Whether another engine has prefilled the request, so that this one reads its KV blocks and no images."""
        parameters = body.get("kv_transfer_params")
        is_remote = isinstance(parameters, dict) and bool(parameters.get("do_remote_prefill"))
        return is_remote and self._config.kv_transfer_config is not None

    def _told(
        self, info: RequestInfo, answers: Mapping[int, Submitted], names: Sequence[ImageName]
    ) -> RequestInfo:
        """Return what the connector is told about a request's images. `answers` has those to images, by index."""
        return replace(
            info,
            stored=tuple(index for index, answer in answers.items() if answer.cached),
            submitted_to=tuple(
                answers[index].endpoint if index in answers else ""
                for index in range(max(answers, default=-1) + 1)
            ),
            images=tuple(dict.fromkeys(name.hex() for name in names)),
        )

    def _find_failed(
        self,
        door: Door,
        weights: str | None,
        labels: Sequence[str],
        answers: Sequence[Submitted],
        info: RequestInfo,
        *,
        continues: bool = False,
    ) -> FindFailed:
        async def find_failed() -> EncoderError | None:
            if not self.settings.takes_any_model:
                await self._ask_for_weights()
            if self._weights != weights:
                return UnavailableError(NEW_WEIGHTS)
            return await failed_image(
                door.client,
                answers,
                labels,
                request_id=info.request_id,
                timeout_s=self.settings.submit_timeout_s,
                continues=continues,
            )

        return find_failed

    def _first(
        self, door: Door, labels: Sequence[str], answers: Sequence[Submitted], info: RequestInfo
    ) -> FindFailed | None:
        """Return what waits for the first image of a request; None if it is encoded."""
        if not answers or answers[0].cached:
            return None
        return partial(
            first_encoded,
            door.client,
            answers,
            labels[0],
            self._config.scheduler_config.max_num_batched_tokens,
            request_id=info.request_id,
            priority=info.priority,
            timeout_s=self.settings.submit_timeout_s,
        )

    def leave_to_own_tower(self, images: RequestImages | ContentParts | None, error: EncoderError) -> bool:
        """Leave the images of a request to the engine's own tower; return False if it cannot encode them.

        The engine has no pixels of earlier responses. If `error` means that the service is down, the engine's tower
        encodes the images of all requests until the service answers.
        """
        if not self.settings.has_own_tower:
            return False
        if self._weights is not None:
            self._door.note(error)
        return images is None or not self.earlier(images).digests

    def _check(self, images: RequestImages | ContentParts, earlier: Conversation, salt: str) -> None:
        """Raise `InvalidRequestError` for a request that vLLM would refuse, or that continues one of another tenant."""
        if earlier.digests and earlier.tenant_salt != salt:
            raise InvalidRequestError("previous_response_id: that response had another cache_salt")
        if images.has_options and not self._trusts_options:
            raise InvalidRequestError(
                f"{' and '.join(OPTIONS)} of a request are refused by vLLM without --trust-request-mm-kwargs"
            )

    @property
    def _again_s(self) -> float:
        """How long to retry while no server accepts the images of a running request.

        Shorter than `timeout_s`, so that the middleware gives up before the connector does. The request is then
        refused, or the engine's own tower encodes its images.
        """
        return self.settings.submit_timeout_s if self.settings.has_own_tower else self.settings.timeout_s / 2

    async def close(self) -> None:
        """Close the connection."""
        await self._door.close()

    async def _media(
        self, images: RequestImages | ContentParts, door: Door, request_id: str, salt: str
    ) -> list[Medium]:
        """Load the images and videos of a request; return them in its order."""
        references = images.references()
        files = await door.load("image", self._sources(references, salt))
        for (url, uuid), file in zip(references, files, strict=True):
            # Another request may have sent a newer image of a `uuid` that has no URL here.
            if url and uuid and len(file) <= MAX_STORED_BYTES:
                self._by_uuid[salt, uuid] = file
        if isinstance(images, ContentParts) or not (urls := images.video_urls()):
            return stills(files)
        await asyncio.to_thread(self._check_fields, images)
        check_limits(self._config, images=len(files), videos=len(urls))
        videos = await self._videos(urls, images.sampling, door, request_id)
        pairs = sum(len(video.files) for video in videos)
        check_limits(self._config, images=len(files), videos=len(videos), pairs=pairs)
        return images.in_order(stills(files), videos)

    def _sources(self, references: Sequence[tuple[str, str]], salt: str) -> list[str | bytes]:
        """Return the URL of each image; if there is none, what was sent with its `uuid` before."""
        sources: list[str | bytes] = []
        sent: dict[str, str] = {}
        for index, (url, uuid) in enumerate(references):
            source = url or sent.get(uuid) or self._by_uuid.get((salt, uuid))
            if source is None:
                raise InvalidRequestError(
                    f"image {index} has no image_url, and the image of its uuid is no longer kept: send it again"
                )
            if url:
                sent[uuid] = url
            sources.append(source)
        return sources

    async def _videos(self, urls: list[str], sampling: Sampling, door: Door, request_id: str) -> list[Medium]:
        """Load videos, ask the service for their frame counts and rates, and choose their frames."""
        if self._content_format == "string":
            raise UnsupportedVideoError(
                "videos cannot be served with --chat-template-content-format string: it moves images to the front"
            )
        if self._video_settings is None:
            description = door.client.description
            self._video_settings = await asyncio.to_thread(video_settings, self._config, description)
        return await door.videos(
            await door.load("video", urls),
            self._video_settings,
            clip=partial(sampling.clip, self._video_settings),
            request_id=request_id,
            timeout_s=self.settings.submit_timeout_s,
        )

    def _check_fields(self, images: RequestImages) -> None:
        """Raise `UnsupportedVideoError` if the chat template reads a field of a video, since it is not shown videos."""
        if not (fields := images.video_fields()):
            return
        template = images.body.get("chat_template") or self._chat_template
        if not template:
            template = cached_tokenizer_from_config(self._config.model_config).chat_template
        if read := [field for field in fields if re.search(rf"\b{re.escape(field)}\b", str(template))]:
            raise UnsupportedVideoError(
                f"the chat template reads {min(read)} of a video, which it is not shown"
            )

    def _video_tokens(self, clips: list[Clip]) -> VideoTokenCounts | None:
        """Count the tokens of a request's videos, if vLLM's answers show the tokens of each modality."""
        if not clips or not self._shows_tokens:
            return None
        assert self._video_settings is not None, "it was read for the clips"
        tokenizer = cached_tokenizer_from_config(self._config.model_config)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return VideoTokenCounts.of(clips, self._video_settings, encode)

    def _named(
        self, media: Sequence[Medium], names: Iterator[ImageName], stand_ins: dict[str, str], *, seal: bool
    ) -> list[list[NamedImage]]:
        """Return what vLLM gets for the files of each medium. With `seal`, identifiers contain their names."""
        identifier = self.signer.sealed if seal else self.signer.identifier
        return [
            [
                NamedImage(identifier(name), list(name.grid), stand_ins.get(medium.name, ""))
                for name in islice(names, len(medium.files))
            ]
            for medium in media
        ]


async def _read(door: Door, media: Sequence[Medium]) -> list[Submitted]:
    """Return answers to media whose rows nobody needs, from their headers; none if only a server can count the rows."""
    answers = await door.read(media)
    return answers if all(answer.grid for answer in answers) else []


def _name(answer: Submitted, producer: bytes) -> ImageName:
    """Return the name of a submitted image."""
    assert answer.grid is not None, "an answer without an error has a grid"
    return ImageName(answer.digest, answer.grid, producer, answer.frames)


def _parts(medium: Medium, named: Sequence[NamedImage]) -> Sequence[str | NamedImage]:
    """Return the parts that vLLM gets instead of an image or a video."""
    return named if medium.video is None else prompt_parts(medium.video.clip, named)


def _stand_ins(media: Sequence[Medium]) -> dict[str, str]:
    """Return the URL of a stand-in for each image, by its name; raise the error of the first that cannot have one."""
    urls = {}
    for index, medium in enumerate(each for each in media if each.video is None):
        (file,) = medium.files
        assert isinstance(file, bytes)
        try:
            urls[medium.name] = blank_url(*size_of(file))
        except EncoderError as error:
            raise error.about(medium.name, index) from error
    return urls


@contextmanager
def _traced(context: str) -> Iterator[None]:
    """Send a `traceparent` with the calls of this block."""
    token = traceparent.set(context)
    try:
        yield
    finally:
        traceparent.reset(token)


def _encoded(body: object) -> bytes:
    """Return a body as JSON. No thread does this: the encoder, as the parser, lets no other thread run meanwhile."""
    try:
        return json.dumps(body).encode()
    except RecursionError:
        raise InvalidRequestError("the request's JSON is nested too deeply") from None


def _salt(settings: VllmSettings, body: dict[str, Any]) -> str:
    cache_salt = body.get("cache_salt")
    return salt_of(settings.tenant_salt, cache_salt if isinstance(cache_salt, str) else None)
