"""The ASGI middleware for vLLM's `--middleware`: it takes images and videos out of a request before vLLM reads it.

It submits each image to the encoder service, which answers from the header, and replaces the image by its name and
grid. vLLM therefore loads and processes no pixels, and the service encodes while vLLM tokenises, queues and prefills
text. Where only the service can count rows, vLLM lays out a blank image of the same size (`request_images.py`). A video
becomes text and an image for each pair of its frames (`videos.py`).

All images of a request are replaced, or none. They stay submitted until the request ends, at another server if theirs
fails. When it ends, the servers drop the images that they have not encoded.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hmac import compare_digest
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

from cachetools import LRUCache
from vllm import envs
from vllm.tokenizers import cached_tokenizer_from_config

from encoder_contract.errors import EncoderError, InvalidRequestError, ModelMismatchError, Status
from encoder_contract.video import Clip, VideoSettings
from prefill_client.fleet.submission import KeptImages
from prefill_client.images import File, Submitted
from prefill_client.media.destinations import Destinations
from prefill_client.media.download import ImageHostError
from prefill_client.media.local_files import LocalFolder
from prefill_client.plugin.door import Door, Medium, clips_of, files_of, names_of, stills
from prefill_client.plugin.service import WatchedClient
from prefill_client.transport.connection import traceparent
from prefill_client.vllm.counts import answers
from prefill_client.vllm.guarded_request import (
    App,
    FindFailed,
    GuardedRequest,
    Receive,
    Send,
    failed_image,
    http_status,
    read_body,
    replay,
    send_error,
    with_length,
)
from prefill_client.vllm.image_name import (
    MAX_PRIORITY,
    NAME_PREFIX,
    ImageName,
    NameSigner,
    RequestInfo,
    identifier_of,
    producer_of,
    salt_of,
    valid_traceparent,
)
from prefill_client.vllm.name_key import read_name_key
from prefill_client.vllm.parts import template_text
from prefill_client.vllm.request_images import (
    BATCH,
    CHAT,
    RESPONSES,
    ApiShape,
    NamedImage,
    RequestImages,
    blank_url,
    check_other_route,
    size_of,
)
from prefill_client.vllm.service_check import check_description, check_limits, video_settings
from prefill_client.vllm.videos import (
    OPTIONS,
    Sampling,
    UnsupportedVideoError,
    VideoTokenCounts,
    prompt_parts,
)
from prefill_client.vllm.vllm_settings import VllmSettings

_log = logging.getLogger("vllm.encoder_service")
Result = TypeVar("Result")
FORMS = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": BATCH,
    "/invocations": CHAT,
    "/v1/responses": RESPONSES,
}
"""The routes whose images are replaced, and how their requests carry images."""
OTHER_ROUTES = frozenset(
    (
        "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render", "/v1/chat/completions/render",
        "/v1/responses/render", "/tokenize", "/inference/v1/generate", "/v1/embeddings", "/v2/embed", "/pooling",
        "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring",
        "/cohere/v2/chat", "/cohere/v2/chat/render", "/v1/systemone", "/v1/decisions",
    )
)  # fmt: skip
"""The routes that take images for the engine's own tower, or for no tower."""
WEIGHT_ROUTES = frozenset(("/update_weights", "/finish_weight_update"))
"""The routes that change the weights of a running engine."""
# A body without these has no media, embeddings or names. Escapes of ASCII could hide them, and so could UTF-16.
_MARKS = (
    NAME_PREFIX.encode(),
    b"embeds",
    b"image",
    b"video",
    b"\0",
    *(b"\\u00%d" % row for row in range(2, 8)),
)
# Bytes of a body that the event loop parses within a millisecond. Bodies with images in them have megabytes.
_SHORT = 1 << 16
# Bytes of the files of stored responses, which are kept in case the service loses them. The least recently used are
# dropped first.
MAX_STORED_BYTES = 256 << 20
_NEW_WEIGHTS = (
    "the engine's weights were updated, and may no longer be those of the encoder service: images are not encoded by "
    'the service until the engine restarts. If the vision weights never change, set "model_fingerprint": "any"'
)
MAX_RESPONSES = 65536  # vLLM itself keeps every response for the life of its process


class EncoderServiceMiddleware:
    """One for each API server. The `ec_connector_extra_config` of its engine configures it."""

    def __init__(self, app: App) -> None:
        answers()  # vLLM shows it from the start
        self._app = app
        self._service: _Service | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request, or the server's lifespan events."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._service is not None:
                    await self._service.close()
            return
        route = _route(scope)
        if not route or not _is_authorized(scope):
            await self._app(scope, receive, send)
        elif (form := FORMS.get(route)) is not None:
            await self._handle(form, scope, receive, send)
        elif route in OTHER_ROUTES:
            await self._handle_other(route, scope, receive, send)
        else:
            await self._app(
                scope, receive, self._noting_weights(scope, send) if route in WEIGHT_ROUTES else send
            )

    async def _handle_other(
        self, route: str, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        body = await read_body(receive)
        if body is None:  # the caller has left
            return
        if any(mark in body for mark in _MARKS):
            check = partial(check_other_route, route=route, has_tower=self._service_of(scope).has_tower)
            try:
                await _parsed(body, check)
            except EncoderError as error:
                await _answer(send, error, _request_id(scope))
                return
        await self._app(scope, replay(body, receive), send)

    def _noting_weights(self, scope: MutableMapping[str, Any], send: Send) -> Send:
        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] < 300:
                self._service_of(scope).weights_changed()
            await send(message)

        return noting

    async def _handle(
        self, form: ApiShape, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        body = await read_body(receive)
        if body is None:  # the caller has left
            return
        error: EncoderError | None = None
        images: RequestImages | None = None
        submitted: _Submitted | None = None
        request_id = _request_id(scope)
        try:
            images = await self._images(form, scope, body)
            submitted = await self._submit(scope, images, request_id) if images is not None else None
        except EncoderError as raised:
            error = raised
        if submitted is not None:
            error = await self._guarded(submitted, scope, receive, send)
            if error is None:
                return
        if error is not None:
            if _is_of_the_image(error) or not self._service_of(scope).leave_to_own_tower(images, error):
                await _answer(send, error, request_id)
                return
            _log.warning("the engine's own tower encodes the images of a request: %s", error.message)
        await self._app(with_length(scope, len(body)), replay(body, receive), send)

    async def _guarded(
        self, submitted: "_Submitted", scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> EncoderError | None:
        """Let vLLM answer while the images stay submitted. Return the error of an image if vLLM could not answer."""
        async with submitted.kept as kept:
            exchange = GuardedRequest(
                submitted.body, kept, submitted.find_failed, receive, send, videos=submitted.videos
            )
            return await exchange.run(self._app, with_length(scope, len(submitted.body)))

    async def _images(
        self, form: ApiShape, scope: MutableMapping[str, Any], body: bytes
    ) -> RequestImages | None:
        """Return a request that has images, or continues a response with images; else None."""
        images = await _parsed(body, partial(RequestImages, form=form))
        if images.in_background:
            return None  # vLLM answers at once, and the end of the request would withdraw its images
        if len(images) or (images.previous_response and self._service_of(scope).earlier(images).digests):
            return images
        return None

    async def _submit(
        self, scope: MutableMapping[str, Any], images: RequestImages, request_id: str
    ) -> "_Submitted":
        """Submit the images and replace them by names."""
        trace = valid_traceparent(_headers(scope).get("traceparent"))
        info = RequestInfo(request_id, _priority(images.body), traceparent=trace)
        return await self._service_of(scope).submit(images, info)

    def _service_of(self, scope: MutableMapping[str, Any]) -> "_Service":
        if self._service is None:
            state = scope["app"].state
            self._service = _Service(state.vllm_config, state.args)
        return self._service


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A body with names instead of images, those images, and a function that finds the one that failed.

    `videos` is None if the answer does not show the tokens of videos.
    """

    body: bytes
    kept: KeptImages
    find_failed: FindFailed
    videos: VideoTokenCounts | None


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The images of a conversation up to a response, in the order of its prompt: their digests and names."""

    digests: tuple[bytes, ...] = ()
    identifiers: tuple[str, ...] = ()
    tenant_salt: str = ""

    def answers(self, media: Sequence[Medium], answers: Iterator[Submitted]) -> list[Submitted]:
        """Return an answer for each image. An image without a file was not submitted, and gets one without an endpoint.

        Consumes the answers to the files of `media`, these images.
        """
        images = zip(self.digests, media, strict=True)
        return [next(answers) if medium.files else Submitted(digest) for digest, medium in images]


class _StoredResponses:
    """The images of responses that vLLM stores: a request that continues one needs them, but does not send them.

    Like vLLM's own store, each API server has one.
    """

    def __init__(self) -> None:
        self._responses: LRUCache[str, _Conversation] = LRUCache(MAX_RESPONSES)
        self._files: LRUCache[bytes, bytes] = LRUCache(MAX_STORED_BYTES, getsizeof=len)

    def add(self, response_id: str, conversation: _Conversation, new: Sequence[File]) -> None:
        """Remember a response with its images, of which the last have the files `new`."""
        self._responses[response_id] = conversation
        for digest, file in zip(reversed(conversation.digests), reversed(new), strict=False):
            if isinstance(file, bytes) and len(file) <= MAX_STORED_BYTES:
                self._files[digest] = file

    def conversation(self, response_id: str) -> _Conversation:
        """Return the images up to a response; no images for an unknown one."""
        return self._responses.get(response_id, _Conversation())

    def media(self, conversation: _Conversation) -> list[Medium]:
        """Return the images of a conversation. One whose file has been dropped has none."""
        files = map(self._files.get, conversation.digests)
        return [Medium(f"image {index}", [] if file is None else [file]) for index, file in enumerate(files)]


class _Service:
    """The middleware's connection to the encoder service: opened at the first image, and again if that failed."""

    def __init__(self, vllm_config: Any, args: Any) -> None:
        """`args` are those of the command `vllm serve`."""
        config = vllm_config.ec_transfer_config
        if config is None:
            raise RuntimeError("the middleware needs EncoderServiceConnector in --ec-transfer-config")
        self.settings = VllmSettings.read(config.ec_connector_extra_config)
        self._config = vllm_config
        self._signer = NameSigner(read_name_key(self.settings.name_key_file))
        self._content_format = getattr(args, "chat_template_content_format", "auto")
        self._chat_template = template_text(getattr(args, "chat_template", ""))
        self._trusts_options = getattr(args, "trust_request_mm_kwargs", False)
        self._shows_tokens = getattr(args, "enable_prompt_tokens_details", False)
        folder = getattr(args, "allowed_local_media_path", "") or ""
        open_door = partial(
            Door.open,
            self.settings,
            Destinations(getattr(args, "allowed_media_domains", None) or ()),
            files=LocalFolder(folder, "--allowed-local-media-path"),
            check=partial(check_description, self.settings, vllm_config),
        )
        self._door = WatchedClient(open_door, _log)
        self._video_settings: VideoSettings | None = None
        self._responses = _StoredResponses()
        self._by_uuid: LRUCache[tuple[str, str], bytes] = LRUCache(MAX_STORED_BYTES, getsizeof=len)
        self._weights_changed = False

    @property
    def has_tower(self) -> bool:
        """Whether the engine has loaded its own tower for images."""
        return bool(self._config.model_config.multimodal_config.get_limit_per_prompt("image"))

    def weights_changed(self) -> None:
        """Note that the engine's weights are no longer those of its checkpoint, which were compared."""
        if not self._weights_changed and not self.settings.takes_any_model:
            _log.error("%s", _NEW_WEIGHTS)
            self._weights_changed = True

    def earlier(self, images: RequestImages) -> _Conversation:
        """Return the images of the response that a request continues; they come first in its prompt."""
        return self._responses.conversation(images.previous_response)

    async def submit(self, images: RequestImages, info: RequestInfo) -> _Submitted:
        """Submit a request's images and replace them by names; raise the error of the first that failed.

        `info` has the caller's fields for the service. Also submits the images of the response that the request
        continues, if their files are still kept.
        """
        salt, earlier = _salt(self.settings, images.body), self.earlier(images)
        self._check(images, earlier, salt)
        door = await self._open(salt)
        with _traced(info.traceparent):
            media = await self._media(images, door, info.request_id, salt)
            lays_out = door.client.description.geometry is None
            stand_ins = await asyncio.to_thread(_stand_ins, media) if lays_out else {}
            continued = self._responses.media(earlier)
            kept = await self._keep(door, [*continued, *media], info)
        try:
            remaining = iter(kept.answers)
            answers = [*earlier.answers(continued, remaining), *remaining]
            new, producer = iter(answers[len(continued) :]), producer_of(door.client.description, salt)
            named = [
                self._named(
                    medium, new, producer, stand_ins.get(medium.name, ""), seal=images.loses_parameters
                )
                for medium in media
            ]
            identifiers = (*earlier.identifiers, *(image.identifier for each in named for image in each))
            images.replace([*map(_parts, media, named)], self._told(info, answers, identifiers))
            if envs.VLLM_ENABLE_RESPONSES_API_STORE and (response_id := images.stored_as()):
                digests = tuple(answer.digest for answer in answers)
                self._responses.add(response_id, _Conversation(digests, identifiers, salt), files_of(media))
            body = await _encoded(images.body)
            tokens = self._video_tokens(clips_of(media))
        except BaseException:  # else the images would stay submitted
            await kept.close()
            raise
        names = [*(medium.name for medium in continued), *names_of(media)]
        return _Submitted(body, kept, self._find_failed(door, names, answers, info), tokens)

    async def _open(self, salt: str) -> Door:
        """Return the door of a tenant. Raises `ModelMismatchError` once the engine's weights have changed."""
        if self._weights_changed:
            raise ModelMismatchError(_NEW_WEIGHTS)
        return (await self._door.get()).for_tenant(salt)

    async def _keep(self, door: Door, media: Sequence[Medium], info: RequestInfo) -> KeptImages:
        return await door.keep(
            media,
            request_id=info.request_id,
            priority=info.priority,
            timeout_s=self.settings.submit_timeout_s,
            again_s=self._again_s,
        )

    def _told(
        self, info: RequestInfo, answers: Sequence[Submitted], identifiers: Sequence[str]
    ) -> RequestInfo:
        """Return what the connector is told about a request's images."""
        return replace(
            info,
            stored=tuple(index for index, answer in enumerate(answers) if answer.cached),
            submitted_to=tuple(answer.endpoint for answer in answers),
            proofs=tuple(map(self._signer.proof, identifiers)),
        )

    def _find_failed(
        self, door: Door, names: Sequence[str], answers: Sequence[Submitted], info: RequestInfo
    ) -> FindFailed:
        timeout_s = self.settings.submit_timeout_s
        return partial(
            failed_image, door.client, answers, names, request_id=info.request_id, timeout_s=timeout_s
        )

    def leave_to_own_tower(self, images: RequestImages | None, error: EncoderError) -> bool:
        """Leave the images of a request to the engine's own tower; return False if it cannot encode them.

        The engine has no pixels of earlier responses. If `error` means that the service is down, the engine's tower
        encodes the images of all requests until the service answers.
        """
        if not self.settings.has_own_tower:
            return False
        if not self._weights_changed:
            self._door.note(error)
        return images is None or not self.earlier(images).digests

    def _check(self, images: RequestImages, earlier: _Conversation, salt: str) -> None:
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

    async def _media(self, images: RequestImages, door: Door, request_id: str, salt: str) -> list[Medium]:
        """Load the images and videos of a request; return them in its order."""
        references = images.references()
        files = await door.load("image", self._sources(references, salt))
        for (url, uuid), file in zip(references, files, strict=True):
            # Another request may have sent a newer image of a `uuid` that has no URL here.
            if url and uuid and len(file) <= MAX_STORED_BYTES:
                self._by_uuid[salt, uuid] = file
        if not (urls := images.video_urls()):
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
        self, medium: Medium, answers: Iterator[Submitted], producer: bytes, stand_in: str, *, seal: bool
    ) -> list[NamedImage]:
        """Return a name for each file of a medium. Consumes the answers to its files.

        With `seal`, names contain their proofs.
        """
        named: list[NamedImage] = []
        for answer in islice(answers, len(medium.files)):
            assert answer.grid is not None, "an answer without an error has a grid"
            identifier = identifier_of(ImageName(answer.digest, answer.grid, producer, answer.frames))
            if seal:
                identifier = self._signer.sealed(identifier)
            named.append(NamedImage(identifier, list(answer.grid), stand_in))
        return named


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


def _is_of_the_image(error: EncoderError) -> bool:
    """Whether an image or its host is at fault; any other error means that the service cannot help."""
    if isinstance(error, UnsupportedVideoError):
        return False
    return isinstance(error, ImageHostError) or error.status in (
        Status.INVALID_ARGUMENT,
        Status.PERMISSION_DENIED,
        Status.NOT_FOUND,
    )


@contextmanager
def _traced(context: str) -> Iterator[None]:
    """Send a `traceparent` with the calls of this block."""
    token = traceparent.set(context)
    try:
        yield
    finally:
        traceparent.reset(token)


async def _encoded(body: object) -> bytes:
    try:
        return await asyncio.to_thread(lambda: json.dumps(body).encode())
    except RecursionError:
        raise InvalidRequestError("the request's JSON is nested too deeply") from None


def _priority(body: dict[str, Any]) -> int:
    """Return the priority of a request for the service. vLLM puts small priorities first, the service large ones."""
    priority = body.get("priority")
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, -priority)) if isinstance(priority, int) else 0


def _salt(settings: VllmSettings, body: dict[str, Any]) -> str:
    cache_salt = body.get("cache_salt")
    return salt_of(settings.tenant_salt, cache_salt if isinstance(cache_salt, str) else None)


async def _parsed(body: bytes, use: Callable[[Any], Result]) -> Result:
    """Return `use` of the JSON of a body, of None if it is invalid, which vLLM answers. A long body takes a thread."""

    def parse() -> Result:
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        return use(parsed)

    return parse() if len(body) <= _SHORT else await asyncio.to_thread(parse)


async def _answer(send: Send, error: EncoderError, request_id: str) -> None:
    """Answer a request instead of vLLM, whose own counters and middleware do not see it."""
    reason = "image_host" if isinstance(error, ImageHostError) else error.status.name.lower()
    answers().labels(str(http_status(error)[0]), reason).inc()
    await send_error(send, error, request_id)


def _request_id(scope: MutableMapping[str, Any]) -> str:
    return (_headers(scope).get("x-request-id") or uuid4().hex)[:128]


def _route(scope: MutableMapping[str, Any]) -> str:
    """Return the path of a POST request; empty for all others."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return ""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_authorized(scope: MutableMapping[str, Any]) -> bool:
    """Whether vLLM, which checks its API keys after this middleware, would accept a request."""
    args = getattr(scope["app"].state, "args", None)
    keys = [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]
    if not keys:
        return True
    scheme, _, token = _headers(scope).get("authorization", "").partition(" ")
    matches = [compare_digest(token.encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
