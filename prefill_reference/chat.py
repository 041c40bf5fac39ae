"""One chat request, from messages with image files to tokens: where client, session and engine meet."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidRequestError, ModelMismatchError
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
from prefill_client.video import Video, VideoTokens, mark_pairs, read_videos
from prefill_reference.engine import Choose, Embedded, Engine, Prompt, greedy
from prefill_reference.prefix import PrefixCache

Result = TypeVar("Result")

# {"role": ..., "content": text or parts}; a part is
# {"type": "text", "text": str}, {"type": "image", "image": bytes or Image} or {"type": "video", "video": bytes}.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """How one chunk went: where its rows came from, its times; `began_s` is on `time.monotonic`'s clock."""

    chunk: Chunk
    sources: tuple[str, ...]  # of each window: device, host, peer or encoded
    waited_ms: float
    began_s: float
    prefill_ms: float


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A request whose prompt has been prefilled: `logits` [vocab] are those of its last token.

    `prefix_tokens` of the prompt were covered by the KV cache of an earlier one; `runs` are the chunks behind it,
    and `submitted` holds the encoder's answer to each image that has rows there. Behind it the model has room for an
    answer of `room` tokens. `names` are what the KV cache knows its images by.
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

    Requests run at the same time; the language model takes their chunks and tokens one by one, so that one request's
    wait for an image lets another prefill.
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
        """`videos` are the settings of the checkpoint's video processor; without, videos are refused.

        Raises `ModelMismatchError` if encoder and language model merge different numbers of patches into a row.
        """
        geometry, ours = client.description.geometry, engine.language_model.merge_size
        theirs = geometry.merge_size if geometry else 1
        if theirs != ours:
            raise ModelMismatchError(f"the encoder merges {theirs} patches a side, the model {ours}")
        self.client = client
        self._engine = engine
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._prefixes = prefixes or PrefixCache(max_tokens=0)
        self._video_settings = videos
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def close(self) -> None:
        """End the model's thread, after what it is running."""
        self._model_thread.shutdown()

    async def prefill(
        self,
        messages: Sequence[Message],
        *,
        on_chunk: Callable[[ChunkRun], None] = lambda _: None,
        trace: Trace | None = None,
    ) -> Prefilled:
        """Prefill the messages' prompt; call `on_chunk` after every chunk. An image that fails raises its own error.

        `trace` records when each step began and ended; calls to the encoder carry its request id.
        """
        trace = trace or Trace(uuid4().hex)
        with trace.span("hash"):
            stills = await asyncio.to_thread(self._read, messages)
        stills = await self._with_grids(stills, trace.request_id)
        videos = await self._videos(messages, trace)
        images, later = self._in_order(messages, stills, videos)
        trace.images([image.name for image in images])
        with trace.span("lay out"):
            layout = await asyncio.to_thread(self._layout, messages, images, videos)
        names = [image.name + str(so_much).encode() for image, so_much in zip(images, later, strict=True)]
        prefix = self._prefixes.take(layout, names)
        grids = [image.grid for image in images if image.grid is not None]
        prompt = self._engine.start(layout, grids, prefix, later)
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
        """Prefill one chunk; return what was run, and the logits behind it."""
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
        """Yield at most `max_tokens` tokens; then the KV cache is kept for a request that goes on from here."""
        steps = islice(self._engine.decode(prefilled.prompt, prefilled.logits, choose), max_tokens)
        while (token := await self._on_model(next, steps, None)) is not None:
            yield token
        prompt = prefilled.prompt
        self._prefixes.put(prefilled.layout, prompt.generated, prefilled.names, prompt.cache)

    def _read(self, messages: Sequence[Message]) -> list[Image]:
        """Hash the images and read their headers: all that the prompt's layout needs."""
        files = [part["image"] for part in _parts(messages) if part["type"] == "image"]
        images = []
        for number, image in enumerate(read_images(files, self.client.description.geometry)):
            if isinstance(image, EncoderError):
                raise image.about(f"image {number} of the prompt")
            images.append(image)
        return images

    async def _videos(self, messages: Sequence[Message], trace: Trace) -> list[Video]:
        """Return the videos of all messages, with the pairs of frames that the model is shown."""
        files = [part["video"] for part in _parts(messages) if part["type"] == "video"]
        if not files:
            return []
        if self._video_settings is None:
            raise InvalidRequestError("this checkpoint has no video processor: send images")
        with trace.span("videos"):
            found = await read_videos(self.client, files, self._video_settings, request_id=trace.request_id)
        videos = []
        for number, video in enumerate(found):
            if isinstance(video, EncoderError):
                text = f"video {number}: {video.message}"
                raise type(video)(text, retry_after_ms=video.retry_after_ms)
            videos.append(video)
        return videos

    def _in_order(
        self, messages: Sequence[Message], stills: Sequence[Image], videos: Sequence[Video]
    ) -> tuple[list[Image], list[int | None]]:
        """Return the images of the prompt, in order, and how much later each is than its video (`mrope_positions`)."""
        left, albums = iter(stills), iter(videos)
        images: list[Image] = []
        later: list[int | None] = []
        for part in _parts(messages):
            if part["type"] == "image":
                images.append(next(left))
                later.append(None)
            elif part["type"] == "video":
                video = next(albums)
                images += video.images
                later += self._later(video)
        return images, later

    def _later(self, video: Video) -> list[int | None]:
        """Return how much later each pair is than the first, in positions, for a model that counts time in them."""
        assert self._video_settings is not None
        if self._video_settings.writes_time:
            return [None] * len(video.images)
        interval = self._engine.language_model.positions_per_s * video.clip.seconds_per_pair
        return [
            None,
            *(int(np.float32(number) * np.float32(interval)) for number in range(1, len(video.images))),
        ]

    async def _with_grids(self, images: Sequence[Image], request_id: str) -> list[Image]:
        """Return the images with their grids. Those in a rare format are submitted: the answer has theirs."""
        rare = {number: image for number, image in enumerate(images) if image.grid is None}
        found = dict(enumerate(images))
        for number, answer in (await self._submit(rare, request_id)).items():
            found[number] = replace(found[number], grid=answer.grid, tokens=answer.tokens)
        return list(found.values())

    async def _submit(self, images: Mapping[int, Image], request_id: str) -> dict[int, Submitted]:
        """Submit the images that have rows to fetch."""
        if not images:
            return {}
        answers = await self.client.submit(list(images.values()), request_id=request_id)
        submitted = dict(zip(images, answers, strict=True))
        for number, image in submitted.items():
            if image.error:
                raise image.error.about(f"image {number} of the prompt")
        return submitted

    def _layout(
        self, messages: Sequence[Message], images: Sequence[Image], videos: Sequence[Video]
    ) -> Layout:
        """Render the messages, one placeholder an image and one a video, and expand them."""
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


def _parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return the parts of all messages in order; a plain text counts as no part."""
    return [
        part for message in messages if not isinstance(message["content"], str) for part in message["content"]
    ]
