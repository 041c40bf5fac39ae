"""The composition root: builds the rooms from a `Config`, strings them together, serves, and drains."""

# Over 300 lines because it is the one place that knows every room.

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from time import time_ns
from uuid import uuid4

from encoder_contract.errors import EncoderError, InvalidImageError, ModelMismatchError
from encoder_contract.geometry import Grid
from encoder_contract.version import __version__
from encoder_service.api.admin import AdminService
from encoder_service.api.describe import banner, describe, facts, reachable
from encoder_service.api.fetch import RowFormat
from encoder_service.api.listener import Listener
from encoder_service.api.service import EncoderService, ServerInfo
from encoder_service.cluster.contract import Cluster, IndexState, Replica
from encoder_service.cluster.coordinator import Coordinator
from encoder_service.cluster.index import RedisIndex, RedisSettings, namespace
from encoder_service.cluster.peers import Peers, RowType
from encoder_service.cluster.solo import Solo
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.encoder import Encoder
from encoder_service.engine.engine import Engine
from encoder_service.engine.job_queue import Job, JobQueue
from encoder_service.engine.model import Model
from encoder_service.engine.row_finder import RowFinder
from encoder_service.engine.submit_waiters import SubmitWaiters
from encoder_service.image.source_cache import SourceCache
from encoder_service.image.validation import Validator
from encoder_service.observability.collectors import (
    cluster_readings,
    identity_readings,
    memory_readings,
    queue_readings,
    store_readings,
)
from encoder_service.observability.logs import toggle_debug
from encoder_service.observability.metrics import Metrics, Reading
from encoder_service.observability.watch import Watch
from encoder_service.scheduler import Limits, Scheduler
from encoder_service.store import Pin, Store, StoreSizeError, TierName
from encoder_service.transport import READS_DEVICE, Transports

log = logging.getLogger(__name__)

LOST_DEVICE = 70  # exit code: the orchestrator starts a fresh process
# Images decoded ahead of the ViT, beside the bound in patches: a thousand thumbnails are one batch.
MAX_AHEAD_IMAGES = 64
# Claims cost memory but no device time: joining is free until here, for each image that may be queued.
CLAIMS_PER_IMAGE = 16


class Server:
    """One serving process. Build it on the event loop that is to serve."""

    def __init__(self, config: Config, model: Model) -> None:
        """Build the rooms. Raises `ConfigError` when the memory of the store cannot be had."""
        self._config = config
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._lost_device = False
        self.replica_id = uuid4().hex[:12]
        self.endpoint = ""  # host:port or unix:path, once it listens
        self.metrics = Metrics()
        self.store = self._build_store()
        self._sources = SourceCache(int(config.source_gib * GIB), config.source_ttl_s)
        self._limits = Limits(
            images=config.max_queued_images,
            patches=config.max_queued_patches,
            source_bytes=int(config.max_queued_gib * GIB),
            claims=CLAIMS_PER_IMAGE * config.max_queued_images,
            client_share=config.max_client_share,
            seconds=config.max_queue_s,
        )
        self.jobs = self._build_jobs()
        self.engine = self._build_engine()
        self.cluster = self._build_cluster()
        self._description = describe(config, model, self.replica_id)
        self.service = self._build_service()

    async def serve(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain: refuse new calls, finish what runs; return the exit code."""
        self._loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
        self._loop.add_signal_handler(signal.SIGUSR1, toggle_debug, self._config.log_level)
        await self.start()
        with suppress(OSError):  # a full disk under our output is no reason not to serve
            print(self.banner(), flush=True)  # noqa: T201 - the one block that says what was chosen
        await self._stop.wait()
        await self.drain()
        return LOST_DEVICE if self._lost_device else 0

    async def start(self) -> None:
        """Listen, join the cluster, begin. Raises `ConfigError` when a port or the index cannot be had."""
        operator = AdminService(self.store, self._sources, self.jobs)
        try:
            self._listener = Listener(
                self._config.listen,
                self.service,
                operator,
                max_calls=self._config.max_calls,
                max_images=self._config.max_images_per_call,
                reader_idle_s=self._config.reader_idle_s,
            )
            self.endpoint = self._listener.endpoint
            self.watch = Watch(
                self._config.metrics_listen,
                self.metrics,
                self._readings,
                title=f"encoder-service {__version__}",
                facts=self._facts(),
                draining=lambda: self.service.draining,
            )
            await self._join_cluster()
        except ConfigError:
            self.store.close()
            raise
        self.watch.start()
        self.engine.start()
        if self._config.store_device_gib:
            threading.Thread(target=self.store.keep_moving, name="store-moves", daemon=True).start()
        await self._listener.start()

    async def drain(self) -> None:
        """Leave the index, refuse new calls, let running ones end (at most `drain_s`), give everything back."""
        for step in (
            partial(self.cluster.hand_over, self._config.hand_over_s),
            self._refuse_new_calls,
            self.cluster.leave,
            partial(self._listener.stop, self._config.drain_s),
            self.engine.stop,
            self.cluster.close,
            partial(asyncio.to_thread, self.watch.stop),
            partial(asyncio.to_thread, self.store.close),
        ):
            try:
                await step()
            except Exception:  # a step that fails takes none of the others with it
                log.exception("while draining")
        log.info("drained")

    async def _refuse_new_calls(self) -> None:
        log.info("draining: running calls have %g s, until Ctrl-C is pressed again", self._config.drain_s)
        self.service.draining = True

    # Building

    def _build_store(self) -> Store:
        config = self._config
        try:
            return Store(
                host_bytes=int(config.store_host_gib * GIB),
                device_bytes=int(config.store_device_gib * GIB),
                device=self._model.device,
                width=self._model.tower.spec.width,
                dtype=self._model.tower.dtype,
                segment_dir=str(config.store_segment_dir),
                promotes=READS_DEVICE,
                on_evict=self._on_evict,
                prefault=config.store_prefault == "yes",
            )
        except StoreSizeError as error:
            raise ConfigError(str(error)) from error

    def _build_jobs(self) -> JobQueue:
        max_ahead = 2 * self._config.batch_patches  # one batch that waits while the next is filled
        return JobQueue(
            Scheduler(self._limits, max_ahead_patches=max_ahead, max_ahead_images=MAX_AHEAD_IMAGES),
            self._model.decoder,
            self.store,
            loop=self._loop,
            metrics=self.metrics,
            on_end=self._ended,
            on_lost_device=self._lose_device,
        )

    def _build_engine(self) -> Engine:
        return Engine(
            self.jobs,
            self._model,
            self.store,
            self.metrics,
            batch_patches=self._config.batch_patches,
            decode_threads=self._config.decode_threads,
            decode_pixels=self._config.decode_pixels,
        )

    def _build_cluster(self) -> Cluster:
        config, recipe, tower = self._config, self._model.recipe, self._model.tower
        if config.index == "memory":
            return Solo()
        index = RedisIndex(
            RedisSettings(
                url=config.index,
                namespace=namespace(config.index_prefix, recipe.model),
                call_timeout_ms=config.index_timeout_ms,
                source_ttl_s=int(config.source_ttl_s),
                max_source_bytes=config.max_image_bytes,
            ),
            held=lambda: {address: Grid(*grid) for address, grid in self.store.grids().items()},
            load=lambda: float(len(self.jobs)),
            on_call=self.metrics.index_call,
        )
        rows = RowType(tower.spec.width, tower.dtype, recipe.dtype, self._model.processor.geometry)
        peers = Peers(recipe.model, recipe.processor, rows, on_fetch=self.metrics.peer_fetch)
        return Coordinator(index, peers, self.store)

    def _build_service(self) -> EncoderService:
        config, model = self._config, self._model
        validator = Validator(
            model.processor.geometry,
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            formats=config.accepted_formats,
            on_hash=partial(self.metrics.stage, "hash"),
        )
        waiters = SubmitWaiters(self.cluster, config.max_waiting_images)
        parts = validator, self._sources, self.jobs, self.store, self.cluster, waiters
        width = model.tower.spec.width
        edge = ServerInfo(
            description=self._description,
            recipe=model.recipe,
            geometry=model.processor.geometry,
            rows=RowFormat(width, model.recipe.dtype, width * model.tower.dtype.itemsize),
            transports=Transports(self.store),
            max_upload_bytes=int(config.max_queued_gib * GIB),
            upload_idle_s=config.upload_idle_s,
            max_pinned_bytes=int(config.store_host_gib * GIB * config.max_pinned_share),
            max_fetched_images=self._limits.claims,
        )
        return EncoderService(Encoder(*parts), RowFinder(*parts), edge, self.metrics)

    async def _join_cluster(self) -> None:
        recipe = self._model.recipe
        advertised = self._config.advertise or reachable(self.endpoint)
        replica = Replica(self.replica_id, time_ns(), advertised, recipe.model, recipe.processor)
        try:
            await self.cluster.join(replica)
        except ModelMismatchError as error:
            raise ConfigError(f"{flag('index')} {self._config.index_for_people}: {error}") from error
        if self.cluster.status.state is not IndexState.JOINED and self._config.index_at_start == "require":
            await self.cluster.close()
            raise ConfigError(
                f"{flag('index')} {self._config.index_for_people} cannot be reached; {flag('index_at_start')} alone "
                "starts without it and joins when it is there"
            )

    # What rooms tell each other through the root

    def _ended(self, job: Job, outcome: Pin | EncoderError) -> None:
        if isinstance(outcome, EncoderError):
            if isinstance(outcome, InvalidImageError):
                self._sources.drop(job.key.source_key)  # it takes no room from those that can be encoded
            self.cluster.release(job.key.address)
        else:
            self.cluster.publish(job.key.address, Grid(*outcome.grid))

    def _on_evict(self, address: bytes, _tier: TierName) -> None:
        """Pass the word on to the event loop, from whichever thread made room."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._evicted, address)

    def _evicted(self, address: bytes) -> None:
        if not self.store.contains(address):
            self.cluster.retract(address)

    def _interrupt(self) -> None:
        if self._stop.is_set() and self.endpoint:
            self._listener.cut()
        self._stop.set()

    def _lose_device(self) -> None:
        self._lost_device = True
        self._stop.set()

    def _readings(self) -> Iterator[Reading]:
        """Read what the rooms count, at a scrape."""
        model = self._model
        yield from identity_readings(
            self._description,
            device=model.device,
            attention=model.tower.attention,
            decoder=model.decoder.name,
            peak_flops=self._config.device_peak_tflops * 1e12,
        )
        yield Reading("draining", self.service.draining)
        yield Reading("padding_patches", model.tower.padding_patches)
        yield from queue_readings(self.jobs.snapshot(), self._limits)
        yield from store_readings(self.store.stats())
        yield from memory_readings(self.store.segment.path, self._sources, self.service.held_upload_bytes)
        yield from cluster_readings(self.cluster.status)

    def banner(self) -> str:
        """Return the block that says what was chosen; its last line says where the server listens."""
        return banner(facts(self._config, self._model, self.replica_id), self.watch.endpoint, self.endpoint)

    def _facts(self) -> dict[str, str]:
        return {**facts(self._config, self._model, self.replica_id), "listening": self.endpoint}
