"""Answers one chat request: from messages with image files to generated tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from torch import Tensor

from encoder_contract.errors import InvalidRequestError, ModelMismatchError
from encoder_contract.video import VideoSettings
from prefill_client import (
    Chunk,
    EncoderClient,
    FetchedRows,
    Image,
    Layout,
    PrefetchSession,
    ReadyChunk,
    RowRequest,
    Submitted,
    Trace,
    expand_prompt,
    plan,
    read_images,
)
from prefill_client.images import without_errors
from prefill_client.plugin.door import Door
from prefill_client.video import Video, VideoTokens, mark_pairs
from prefill_reference.engine import Choose, Embedded, Engine, Prompt, greedy
from prefill_reference.prefix import PrefixCache

Result = TypeVar("Result")

# {"role": ..., "content": text or list of parts}. A part is {"type": "text", "text": str},
# {"type": "image", "image": bytes or Image} or {"type": "video", "video": bytes}.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """A chunk that was prefilled: where its rows came from and how long it took. `began_s` is `time.monotonic`."""

    chunk: Chunk
    sources: tuple[str, ...]  # for each window: device, host, peer or encoded
    waited_ms: float
    began_s: float
    prefill_ms: float


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A request whose prompt has been prefilled. `logits` [vocab] are those of its last token.

    The KV cache of an earlier prompt covered the first `prefix_tokens` tokens. `runs` are the chunks after them, and
    `submitted` holds the encoder's answer to each image with rows in these chunks, by the image's number. The model can
    generate `room` tokens more. `names` identify the images in the prefix cache.
    """

    prompt: Prompt
    logits: Tensor
    layout: Layout
    images: tuple[Image, ...]
    submitted: Mapping[int, Submitted]
    prefix_tokens: int
    runs: tuple[ChunkRun, ...]
    room: int
    names: tuple[bytes, ...]


class Chat:
    """Answers chat requests with one language model and one encoder.

    Requests run concurrently. One thread runs the language model, a chunk or a token at a time: while one request waits
    for an image, another one prefills.
    """

    def __init__(
        self,
        client: EncoderClient,
        engine: Engine,
        tokenizer: Any,
        *,
        chunk_tokens: int,
        prefixes: PrefixCache | None = None,
        videos: VideoSettings | None = None,
    ) -> None:
        """`videos` are the settings of the checkpoint's video processor; None refuses videos.

        Raises `ModelMismatchError` if encoder and language model merge different numbers of patches into a row.
        """
        geometry, model_merges = client.description.geometry, engine.language_model.merge_size
        encoder_merges = geometry.merge_size if geometry else 1
        if encoder_merges != model_merges:
            raise ModelMismatchError(
                f"the encoder merges {encoder_merges} patches a side, the model {model_merges}"
            )
        self.client = client
        self._engine = engine
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._prefixes = prefixes or PrefixCache(max_tokens=0)
        self._video_settings = videos
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def close(self) -> None:
        """End the model's thread once it has finished its current work."""
        self._model_thread.shutdown()

    async def prefill(
        self,
        messages: Sequence[Message],
        *,
        on_chunk: Callable[[ChunkRun], None] = lambda _: None,
        trace: Trace | None = None,
    ) -> Prefilled:
        """Prefill the prompt of `messages`, and call `on_chunk` after every chunk. Raises the error of a failed image.

        `trace` records when each step began and ended. Calls to the encoder carry the trace's request id.
        """
        trace = trace or Trace(uuid4().hex)
        with trace.span("hash"):
            stills = await asyncio.to_thread(self._read, messages)
        stills = await self._with_grids(stills, trace.request_id)
        videos = await self._videos(messages, trace)
        images, offsets = self._in_order(messages, stills, videos)
        trace.images([image.name for image in images])
        with trace.span("lay out"):
            layout = await asyncio.to_thread(self._layout, messages, images, videos)
        names = [image.name + str(offset).encode() for image, offset in zip(images, offsets, strict=True)]
        prefix = self._prefixes.take(layout, names)
        grids = [image.grid for image in images if image.grid is not None]
        prompt = self._engine.start(layout, grids, prefix, offsets)
        begin = prompt.done
        with trace.span("submit"):
            submitted = await self._submit(
                {span.image: images[span.image] for span in layout.spans if span.end > begin},
                trace.request_id,
            )
        trace.submitted(submitted)
        runs: list[ChunkRun] = []
        logits: Tensor | None = None
        async with PrefetchSession(
            partial(trace.watch(self.client.fetch), request_id=trace.request_id),
            plan(layout, self._chunk_tokens, begin=begin),
            [RowRequest.of(image) for image in images],
            row_bytes=self.client.description.row_bytes,
        ) as session:
            async for ready in session:
                run, logits = await self._prefill_chunk(prompt, ready, trace)
                runs.append(run)
                on_chunk(run)
        assert logits is not None, "a prefix never covers the whole prompt"
        room = self._engine.room(prompt)
        return Prefilled(
            prompt, logits, layout, tuple(images), submitted, begin, tuple(runs), room, tuple(names)
        )

    async def _prefill_chunk(
        self, prompt: Prompt, ready: ReadyChunk, trace: Trace
    ) -> tuple[ChunkRun, Tensor]:
        """Prefill one chunk; return its `ChunkRun` and the logits of its last token."""
        ready_s = time.monotonic()
        embed = partial(self._embed, prompt, ready.chunk)
        run, logits = await self._on_model(
            self._run, prompt, ready, await ready.read(embed, self._model_thread)
        )
        lane = f"chunk {run.chunk.index}"
        trace.add(lane, "wait", ready_s - run.waited_ms / 1000, ready_s)
        trace.add(lane, "prefill", run.began_s, run.began_s + run.prefill_ms / 1000)
        return run, logits

    async def decode(
        self, prefilled: Prefilled, *, max_tokens: int, choose: Choose = greedy
    ) -> AsyncGenerator[int, None]:
        """Yield at most `max_tokens` tokens. Then keep the KV cache for a follow-up request."""
        steps = islice(self._engine.decode(prefilled.prompt, prefilled.logits, choose), max_tokens)
        while (token := await self._on_model(next, steps, None)) is not None:
            yield token
        prompt = prefilled.prompt
        self._prefixes.put(prefilled.layout, prompt.generated, prefilled.names, prompt.cache)

    def _read(self, messages: Sequence[Message]) -> list[Image]:
        """Hash the images and read their headers, which is enough to lay out the prompt."""
        files = [part["image"] for part in _parts(messages) if part["type"] == "image"]
        images = read_images(files, self.client.description.geometry)
        return without_errors(images, _names(range(len(images))))

    async def _videos(self, messages: Sequence[Message], trace: Trace) -> list[Video]:
        """Return the videos of all messages, with the pairs of frames that the model is shown."""
        files = [part["video"] for part in _parts(messages) if part["type"] == "video"]
        if not files:
            return []
        if self._video_settings is None:
            raise InvalidRequestError("this checkpoint has no video processor: send images")
        with trace.span("videos"):
            media = await Door(self.client).videos(files, self._video_settings, request_id=trace.request_id)
        return [medium.video for medium in media if medium.video is not None]

    def _in_order(
        self, messages: Sequence[Message], stills: Sequence[Image], videos: Sequence[Video]
    ) -> tuple[list[Image], list[int | None]]:
        """Return the images of the prompt, in order, and the time offset of each (see `mrope_positions`)."""
        remaining_stills, remaining_videos = iter(stills), iter(videos)
        images: list[Image] = []
        offsets: list[int | None] = []
        for part in _parts(messages):
            if part["type"] == "image":
                images.append(next(remaining_stills))
                offsets.append(None)
            elif part["type"] == "video":
                video = next(remaining_videos)
                images += video.images
                offsets += self._time_offsets(video)
        return images, offsets

    def _time_offsets(self, video: Video) -> list[int | None]:
        """Return the time of each pair of frames after the first pair, in positions; None for the first.

        All are None for a model that writes timestamps into the prompt instead.
        """
        assert self._video_settings is not None
        if self._video_settings.writes_time:
            return [None] * len(video.images)
        interval = self._engine.language_model.positions_per_s * video.clip.seconds_per_pair
        return [
            None,
            *(int(np.float32(number) * np.float32(interval)) for number in range(1, len(video.images))),
        ]

    async def _with_grids(self, images: Sequence[Image], request_id: str) -> list[Image]:
        """Return the images with their grids. Submit those in rare formats: only the server reads their size."""
        rare = {number: image for number, image in enumerate(images) if image.grid is None}
        found = dict(enumerate(images))
        for number, answer in (await self._submit(rare, request_id)).items():
            found[number] = replace(found[number], grid=answer.grid, tokens=answer.tokens)
        return list(found.values())

    async def _submit(self, images: Mapping[int, Image], request_id: str) -> dict[int, Submitted]:
        """Submit images; return the answers by number. Raises the error of the first image that failed."""
        if not images:
            return {}
        answers = await self.client.submit(list(images.values()), request_id=request_id)
        submitted = dict(zip(images, answers, strict=True))
        for number, name in zip(images, _names(images), strict=True):
            if (error := submitted[number].error) is not None:
                raise error.about(name, number)
        return submitted

    def _layout(
        self, messages: Sequence[Message], images: Sequence[Image], videos: Sequence[Video]
    ) -> Layout:
        """Render the messages with one placeholder for each image and each video, and expand the placeholders."""
        encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        ids, model = encoded["input_ids"], self._engine.language_model
        if videos:
            assert self._video_settings is not None
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            ids = mark_pairs(ids, videos, VideoTokens(*model.video_marks, encode), self._video_settings)
        tokens = [image.tokens for image in images]
        return expand_prompt(ids, (model.image_token, model.video_marks[0]), tokens)

    async def _on_model(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._model_thread, function, *arguments)

    def _embed(self, prompt: Prompt, chunk: Chunk, rows: Sequence[FetchedRows]) -> Embedded:
        return self._engine.embed(prompt, chunk, [each.tensor() for each in rows])

    def _run(self, prompt: Prompt, ready: ReadyChunk, embedded: Embedded) -> tuple[ChunkRun, Tensor]:
        began_s = time.monotonic()
        logits = self._engine.run(prompt, ready.chunk, embedded)
        run = ChunkRun(
            chunk=ready.chunk,
            sources=tuple(rows.source for rows in ready.rows),
            waited_ms=ready.waited_ms,
            began_s=began_s,
            prefill_ms=(time.monotonic() - began_s) * 1000,
        )
        return run, logits


def _names(numbers: Iterable[int]) -> list[str]:
    return [f"image {number} of the prompt" for number in numbers]


def _parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return the parts of all messages in order, without messages whose content is plain text."""
    return [
        part for message in messages if not isinstance(message["content"], str) for part in message["content"]
    ]
