"""Submits the images of a request to the encoder service as files, so that SGLang's tokenizer does not decode them.

A request reaches the scheduler once the service has encoded all its images, so that no image can fail during prefill;
with `gating` "chunk", once the service has accepted them. If the service does not answer, SGLang's own tower encodes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImagePreprocessArtifact, QwenVLImageProcessor
from sglang.srt.runtime_context import get_mm
from sglang.srt.utils import ImageData

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ForbiddenError,
    InvalidImageError,
    InvalidRequestError,
)
from prefill_client.images import RowRequest, Submitted, raise_first
from prefill_client.media.bare_image import as_url
from prefill_client.media.destinations import Destinations
from prefill_client.media.local_files import LocalFolder
from prefill_client.plugin.door import Door, stills
from prefill_client.plugin.model import check_description
from prefill_client.plugin.service import WatchedClient
from prefill_client.sglang.counts import count
from prefill_client.sglang.image_name import SglangImageName, file_as_feature
from prefill_client.sglang.sglang_settings import SglangSettings
from prefill_client.sglang.start import check_configuration, check_packages, check_service, engine_model
from prefill_client.transport.connection import Description

_log = logging.getLogger("sglang.encoder_service")

Result = TypeVar("Result")

# Errors of the request itself: SGLang's own tower could not encode its images either.
_REQUEST_ERRORS = (InvalidImageError, InvalidRequestError, ForbiddenError)


class EncoderServiceProcessor(QwenVLImageProcessor):  # type: ignore[misc]
    """Replaces SGLang's own processor for the families whose towers the service runs."""

    models = [  # noqa: RUF012 - SGLang's name and type
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeForConditionalGeneration,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForConditionalGeneration,
    ]

    def __init__(self, hf_config: Any, server_args: Any, processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, processor, *args, **kwargs)
        check_packages()
        check_configuration(server_args.pp_size)
        self._settings = SglangSettings.from_environment()
        dtype = ModelConfig.from_server_args(server_args).dtype
        self._engine = engine_model(hf_config, processor.image_processor, dtype)
        check_service(self._settings, self._engine)
        open_door = partial(
            Door.open,
            self._settings,
            Destinations(get_mm().allowed_media_domains or ()),
            files=LocalFolder(self._settings.image_folder, "image_folder"),
            check=self._check,
        )
        self._door = WatchedClient(open_door, _log)

    def clear_preprocess_cache(self) -> None:
        """Note that SGLang has loaded weights: this process does not see them, but the scheduler compares them."""
        super().clear_preprocess_cache()
        self._engine = replace(self._engine, fingerprint=None)

    def _check(self, description: Description) -> None:
        check_description(self._settings, self._engine, description)

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return SGLang's inputs of a request. Raises `ValueError`, which SGLang answers with 400, for a bad image."""
        own = partial(super().process_mm_data_async, image_data, input_text, request_obj, *args, **kwargs)
        if not image_data or request_obj.video_data or request_obj.audio_data:
            return await own()
        sources = [image.url if isinstance(image, ImageData) else image for image in image_data]
        if not all(isinstance(source, str | bytes) for source in sources):
            return await self._by_own_tower(own, len(sources), "input")
        try:
            artifacts = await self._encoded(sources, str(getattr(request_obj, "rid", "")))
        except _REQUEST_ERRORS as error:
            raise ValueError(error.message) from error
        except EncoderError as error:
            _log.warning("SGLang's own tower encodes the images of a request: %s", error.message)
            return await self._by_own_tower(own, len(sources), error.status.name.lower())
        composed = self.compose_image_artifacts(input_text, artifacts)
        # None means that the text marks another number of images than the request has. SGLang handles that itself.
        return composed if composed is not None else await self._by_own_tower(own, len(sources), "prompt")

    async def _by_own_tower(self, own: Any, images: int, reason: str) -> Any:
        count("own_tower_images", reason, images)
        return await own()

    async def _encoded(
        self, sources: Sequence[str | bytes], request_id: str
    ) -> list[QwenVLImagePreprocessArtifact]:
        """Return the images of a request once the request may reach the scheduler."""
        began_s = monotonic()
        try:
            door = await self._in_time(self._door.get(), began_s)
        except EncoderError as error:
            self._door.note(error)
            raise
        connected_s = monotonic() - began_s
        sources = [self._as_source(index, source) for index, source in enumerate(sources)]
        files = await door.load("image", sources)
        try:
            answers = await self._submitted(door, files, request_id, monotonic() - connected_s)
        except EncoderError as error:
            self._door.note(error)
            raise
        return [_artifact(answer, file) for answer, file in zip(answers, files, strict=True)]

    def _as_source(self, index: int, source: str | bytes) -> str | bytes:
        """Return an image as a URL, or the file itself. Raises `ForbiddenError` for a path, without `image_folder`."""
        if isinstance(source, bytes):
            return source
        return as_url(source, f"image {index}", reads_files=bool(self._settings.image_folder))

    async def _submitted(
        self, door: Door, files: Sequence[bytes], request_id: str, began_s: float
    ) -> list[Submitted]:
        left_s = max(began_s + self._settings.submit_timeout_s - monotonic(), 0.001)
        submitting = door.submit(stills(files), request_id=request_id, timeout_s=left_s)
        answers = await self._in_time(submitting, began_s)
        if self._settings.gating == "request":
            await self._wait(door, answers, request_id)
        return answers

    async def _in_time(self, call: Awaitable[Result], began_s: float) -> Result:
        """Await a call to the service. Raises `DeadlineError` once `submit_timeout_s` have passed since `began_s`."""
        limit_s = self._settings.submit_timeout_s
        try:
            async with asyncio.timeout(max(began_s + limit_s - monotonic(), 0)):
                return await call
        except TimeoutError:
            raise DeadlineError(f"the encoder service did not answer within {limit_s:g} s") from None

    async def _wait(self, door: Door, answers: Sequence[Submitted], request_id: str) -> None:
        """Wait until all images are encoded. Raises the error of the first image that fails."""
        waited = {index: answer for index, answer in enumerate(answers) if not answer.cached}
        if not waited:
            return
        errors: list[EncoderError | None] = [None] * len(answers)
        requests = [RowRequest(answer.digest, row_end=1) for answer in waited.values()]
        timeout_s = self._settings.timeout_s
        async with door.client.fetch(requests, request_id=request_id, timeout_s=timeout_s) as outcomes:
            async for outcome in outcomes:
                errors[[*waited][outcome.index]] = outcome.error
        raise_first(errors)


def _artifact(answer: Submitted, file: bytes) -> QwenVLImagePreprocessArtifact:
    """Return an image in the form of SGLang's own preprocessing, with the file in place of its pixels.

    SGLang's prefix cache identifies the image by the address of its rows.
    """
    return QwenVLImagePreprocessArtifact(
        content_digest=answer.digest.hex(),
        artifact_key=answer.address.hex(),
        feature_hash=int.from_bytes(answer.address[:8], "big"),
        feature=file_as_feature(file),
        model_specific_data=SglangImageName.of_answer(answer).as_data(),
    )
