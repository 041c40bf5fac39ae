"""The composition root: construct and wire the components from a `Config`, serve, and drain."""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import time_ns
from typing import Any
from uuid import uuid4

from encoder_contract.command_line import say
from encoder_contract.endpoint import is_local
from encoder_contract.errors import (
    EncoderError,
    ImageLimitError,
    InvalidImageError,
    ModelMismatchError,
    UnavailableError,
)
from encoder_contract.version import __version__
from encoder_service import signals
from encoder_service.api.admin import AdminService
from encoder_service.api.caller import Identity
from encoder_service.api.describe import ServerInfo, banner, describe, facts, reachable
from encoder_service.api.server import Listener
from encoder_service.api.service import EncoderService
from encoder_service.api.tenants import read_tenants
from encoder_service.cluster.cluster import Cluster, IndexState, Replica
from encoder_service.cluster.peers import SILENCE_S, Peers
from encoder_service.cluster.redis import RedisSettings, namespace
from encoder_service.cluster.redis_cluster import RedisCluster
from encoder_service.cluster.tasks import FAILED_TASK
from encoder_service.collectors import (
    certificate_readings,
    cluster_readings,
    device_readings,
    identity_readings,
    memory_readings,
    model_readings,
    process_readings,
    queue_readings,
    store_readings,
)
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.devices import EXIT_LOST, EXIT_STUCK
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.dispatcher import Dispatcher
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.devices.served_model import ServedModel
from encoder_service.devices.torch_device import Device
from encoder_service.http import Watch
from encoder_service.image.decoder import DECODE_PIXELS, FileDecoder
from encoder_service.image.sources import SOURCE_TTL_S, VIDEO_LIMITS, SourceCache, Validator
from encoder_service.images import Images
from encoder_service.limits import Budgets
from encoder_service.logs import toggle_debug
from encoder_service.metrics import Metrics, Reading
from encoder_service.rows_port import RowsPort
from encoder_service.scheduler import Scheduler, Snapshot
from encoder_service.store import AnyTier, DiskError, Pin, Store, StoreSizeError
from encoder_service.transport import Transports

log = logging.getLogger(__name__)

EXIT_S = 30.0  # seconds after `drain_s` at which the process exits in any case: something may hang
SNAPSHOT_S = 10.0  # how long a scrape waits for the event loop
# Most images decoded ahead of the ViT. The limit in patches alone would allow a thousand thumbnails.
MAX_AHEAD_IMAGES = 64
MAX_VIDEOS = 256  # most video files in the cache: each has a file descriptor


class Server:
    """One serving process. Construct it on the event loop that will serve."""

    def __init__(
        self,
        config: Config,
        devices: Sequence[DeviceProcess],
        files: FileDecoder,
        *,
        budgets: Budgets | None = None,
        patience: float = 1.0,
    ) -> None:
        """Construct the components. Raises `ConfigError` if there is too little memory for the store.

        The `devices` have loaded the model; `files` reads headers: see `load_devices`.

        For tests: `budgets` replaces the budgets of `config`. `patience` multiplies the time after which a silent Redis
        or replica counts as failed, so that several servers on a busy machine do not take its stalls for failures.
        """
        self._config = config
        self._devices = devices
        self._model = ServedModel.of(devices, files)
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._aborted = False
        self.replica_id = uuid4().hex[:12]
        self._certificates = config.certificates()
        self._peer_certificates = config.peer_certificates()
        self._fleet_key = config.fleet_key()
        self._tenants = read_tenants(config)
        self._identity = Identity(self._tenants, self._fleet_key)
        self.endpoint = ""  # host:port or unix:path, set by `start`
        self.metrics = Metrics()
        self.store = self._build_store()
        self._sources = SourceCache(int(config.source_gib * GIB), SOURCE_TTL_S)
        self._videos = SourceCache(int(config.video_gib * GIB), SOURCE_TTL_S, max_files=MAX_VIDEOS)
        self.budgets = budgets or Budgets.of(config)
        self.jobs = self._build_jobs()
        self.dispatcher = self._build_dispatcher()
        self.cluster = self._build_cluster()
        self.images = self._build_images()
        self._rows_port = self._build_rows_port()
        self._description = describe(config, self._model, self.budgets, self.replica_id)
        self.service = self._build_service()

    async def serve(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGQUIT, then drain. Return the exit code."""
        signals.handle(
            self._loop,
            drain=self._stop.set,
            interrupt=self._interrupt,
            reload=self._reload,
            toggle_debug=partial(toggle_debug, self._config.log_level),
        )
        self._loop.set_exception_handler(self._on_loop_error)
        await self.start()
        if self._config.log_format == "json":
            log.info("listening", extra={"fields": {"version": __version__, **self._settings_in_effect()}})
        else:
            say(self.banner())
        await self._stop.wait()
        # Whatever hangs from here on, the process ends.
        limit_s = self._config.hand_over_s + self._config.drain_s + EXIT_S
        forced_exit = threading.Timer(limit_s, self._force_exit, (limit_s,))
        forced_exit.daemon = True
        forced_exit.start()
        await self.drain()
        return EXIT_LOST if self._aborted else 0

    def _force_exit(self, limit_s: float) -> None:
        log.critical("the server has not ended within %g s: ending it now", limit_s)
        logging.shutdown()
        os._exit(EXIT_LOST if self._aborted else EXIT_STUCK)

    async def start(self) -> None:
        """Bind the ports, join the cluster and serve. Raises `ConfigError` if a port or the index is unavailable."""
        admin = AdminService(self.store, self._sources, self._videos, self.jobs, self._identity, self.metrics)
        try:
            if self._rows_port is not None:
                self._rows_port.start()
            self._listener = Listener(
                self._config.listen,
                self.service,
                admin,
                certificates=self._certificates,
                budgets=self.budgets,
                window_bytes=self._config.call_window_kib << 10,
            )
            self.endpoint = self._listener.endpoint
            self.dispatcher.on_answers = self._listener.set_serving
            self.metrics.read_from(self.readings)
            self.watch = Watch(
                self._config.metrics_listen,
                self.metrics,
                not_ready=self._not_ready,
                never_joined=lambda: self.cluster.never_joined,
                title=f"encoder-service {__version__}",
                facts=self._facts(),
                certificates=self._certificates,
                check_reader=None if is_local(self._config.metrics_listen) else self._identity.check_reader,
            )
            await self._join_cluster()
        except ConfigError:
            await self._stop_rows_port()
            self.store.close()
            raise
        self.watch.start()
        self.dispatcher.start()
        await self._listener.start()

    async def drain(self) -> None:
        """Hand over rows, refuse new calls, leave the index, wait `drain_s` for running calls, free everything."""
        for step in (
            partial(self.cluster.hand_over, 0.0 if self._aborted else self._config.hand_over_s),
            self._refuse_new_calls,
            self.cluster.leave,
            partial(self._listener.stop, self._config.drain_s),
            self._stop_devices,
            self.cluster.close,
            self.watch.stop,
            self._stop_rows_port,
            partial(asyncio.to_thread, self.store.close),
        ):
            try:
                await step()
            except Exception:  # run the other steps all the same
                log.exception("while draining")
        log.info("drained")

    async def _refuse_new_calls(self) -> None:
        log.info(
            "draining: running calls have %g s to finish; press Ctrl-C again to end them now",
            self._config.drain_s,
        )
        self.service.draining = True
        self.images.unsubmitted.end_keeping(UnavailableError("the server is draining: use another server"))

    async def _stop_rows_port(self) -> None:
        if self._rows_port is not None:
            await asyncio.to_thread(self._rows_port.stop)

    async def _stop_devices(self) -> None:
        """Let the workers finish their current images, and fail the queued ones."""
        self.jobs.close()
        await self.dispatcher.stop()
        self.jobs.fail_all(UnavailableError("the server is shutting down: use another server"))

    # Construction

    def _build_store(self) -> Store:
        config, facts = self._config, self._model.facts
        for device in self._devices if config.store_device_gib else ():
            if not Device(device.name).can_access(facts.device):
                raise ConfigError(
                    f"{flag('store_device_gib')}: {device.name} cannot write to the device tier on {facts.device}: "
                    "they have no peer access (`nvidia-smi topo -p2p r`). Set it to 0, or start a server on each GPU"
                )
        try:
            return Store(
                host_bytes=int(config.store_host_gib * GIB),
                device_bytes=int(config.store_device_gib * GIB),
                device=facts.device,
                width=facts.width,
                dtype=facts.dtype,
                segment_dir=str(config.store_segment_dir),
                on_evict=self._on_evict,
                prefault=True,
                disk_folder=Path(config.store_disk) if config.store_disk else None,
                disk_bytes=int(config.store_disk_gib * GIB),
                disk_key=self._fleet_key,
            )
        except (StoreSizeError, DiskError) as error:
            raise ConfigError(str(error)) from error

    def _build_jobs(self) -> JobQueue:
        facts = self._model.facts
        return JobQueue(
            Scheduler(
                self.budgets.queue,
                max_ahead_patches=facts.ahead_patches,
                max_ahead_images=MAX_AHEAD_IMAGES,
                large_pixels=DECODE_PIXELS,
                devices=len(self._devices),
            ),
            self._model.can_batch,
            self.store,
            loop=self._loop,
            metrics=self.metrics,
            on_end=self._ended,
            # The server itself uses a device only for a device tier.
            device=Device(facts.device if self._config.store_device_gib else "cpu"),
            devices=len(self._devices),
            on_abort=self._abort,
        )

    def _build_dispatcher(self) -> Dispatcher:
        tokens = self._model.geometry.tokens
        return Dispatcher(self._devices, self.jobs, self.store, self.metrics, tokens)

    def _build_cluster(self) -> Cluster:
        config, facts = self._config, self._model.facts
        if config.index == "memory":
            return Cluster()
        settings = RedisSettings(
            url=config.index,
            namespace=namespace(config.index_prefix, facts.recipe.model),
            call_timeout_ms=config.index_timeout_ms,
        )
        peers = Peers(
            facts.recipe,
            facts.width,
            self.store.layout.row_bytes,
            self._model.geometry,
            certificates=self._peer_certificates,
            name=config.tls_peer_name,
            key=self._fleet_key,
            on_fetch=self.metrics.peer_fetch,
            silence_s=SILENCE_S * self._patience,
        )
        return RedisCluster(
            settings.with_timeouts_scaled(self._patience),
            peers,
            self.store,
            on_call=self.metrics.index_call,
        )

    def _build_images(self) -> Images:
        config = self._config
        validator = Validator(
            self._model.geometry,
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            formats=config.accepted_formats,
            read_rare_header=self._model.files.read_header,
            open_video=self._model.files.open_video,
            video_limits=VIDEO_LIMITS,
            on_hash=partial(self.metrics.stage, "hash"),
        )
        return Images(
            validator,
            self._sources,
            self._videos,
            self.jobs,
            self.store,
            self.cluster,
            self.budgets.awaited_images,
        )

    def _build_rows_port(self) -> RowsPort | None:
        listen = self._config.rows_listen
        return RowsPort(listen, self._certificates, self.budgets.reader_idle_s) if listen else None

    def _build_service(self) -> EncoderService:
        info = ServerInfo(
            description=self._description,
            recipe=self._model.facts.recipe,
            geometry=self._model.geometry,
            row_bytes=self.store.layout.row_bytes,
            transports=Transports(self.store, self._rows_port),
            identity=self._identity,
        )
        return EncoderService(self.images, info, self.metrics, self.budgets)

    async def _join_cluster(self) -> None:
        recipe = self._model.facts.recipe
        advertised = reachable(self.endpoint, self._config.advertise)
        self._identity.advertised = advertised
        replica = Replica(self.replica_id, time_ns(), advertised, recipe.model, recipe.processor)
        try:
            await self.cluster.join(replica)
        except ModelMismatchError as error:
            raise ConfigError(f"{flag('index')} {self._config.index_for_people}: {error}") from error

    # Callbacks of the components

    def _ended(self, job: Job, outcome: Pin | EncoderError) -> None:
        if isinstance(outcome, EncoderError):
            is_lasting = isinstance(outcome, InvalidImageError) and not isinstance(outcome, ImageLimitError)
            if is_lasting and job.key.frames is None:
                self._sources.drop(job.key.source_key)  # it can never be encoded
            self.cluster.release(job.key.address)
        else:
            self.cluster.publish(job.key.address, outcome.grid)

    def _on_evict(self, address: bytes, _tier: AnyTier) -> None:
        """Report the eviction to the event loop. Called on the thread that evicted."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._evicted, address)

    def _evicted(self, address: bytes) -> None:
        if not self.store.contains(address):
            self.cluster.retract(address)

    def _interrupt(self) -> None:
        if self._stop.is_set() and self.endpoint:
            self._listener.abort_calls()
        self._stop.set()

    def _reload(self) -> None:
        """Read certificates and tenants now. New connections and calls do so, too, but say nothing without a change."""
        if self._certificates is not None:
            _ = self._certificates.pem
        if self._tenants is not None:
            self._tenants.reload()
        log.info("SIGHUP: the files of certificates and tenants are checked; nothing else is read again")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the process if a background task died: the replica would only half work without it."""
        if (name := context.get(FAILED_TASK)) is None or self._stop.is_set():
            loop.default_exception_handler(context)
        else:
            self.jobs.abort(f"the server's task {name} died", context["exception"])

    def _abort(self, error: UnavailableError) -> None:
        self._aborted = True
        self.images.unsubmitted.end(error)
        self.service.draining = True
        self._stop.set()

    # Monitoring

    def _not_ready(self) -> str:
        """Return why the server should get no new calls, or an empty string."""
        if self.draining:
            return "draining"
        return "" if self.dispatcher.answers else "no device answers"

    @property
    def draining(self) -> bool:
        """Whether the server refuses new calls."""
        return self.service.draining

    def readings(self) -> Iterator[Reading]:
        """Yield the state of the components. Each scrape calls it, on a thread."""
        peak_flops = self._config.device_peak_tflops * 1e12 * len(self._devices)
        yield from identity_readings(self._description, self._model.facts, self._device_names, peak_flops)
        yield from process_readings(self.draining)
        peers = self._peer_certificates if self._config.tls_peer_ca else None
        yield from certificate_readings(self._certificates, peers)
        yield from device_readings(self._devices)
        yield from model_readings(self._model.files, self._devices)
        yield from queue_readings(self._snapshot(), self.budgets.queue)
        yield from store_readings(self.store.stats())
        yield from memory_readings(
            self.store.segment.path,
            self._sources,
            self._videos,
            self.budgets.upload_bytes.held,
        )
        yield from cluster_readings(self.cluster.status)

    def _snapshot(self) -> Snapshot:
        """Return the counts of the queue, which only the event loop may read. Works on any thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            counts: Future[Snapshot] = Future()
            self._loop.call_soon_threadsafe(lambda: counts.set_result(self.jobs.scheduler.snapshot()))
            return counts.result(SNAPSHOT_S)
        return self.jobs.scheduler.snapshot()

    def banner(self) -> str:
        """Return the start-up block for standard output: the settings in effect, and last where the server listens."""
        return banner(self._settings_in_effect())

    def _settings_in_effect(self) -> dict[str, str]:
        settings = self._settings()
        if self._config.index != "memory":
            is_joined = self.cluster.status.state is IndexState.JOINED
            why = self.cluster.never_joined
            warning = (
                "" if is_joined else f": unavailable ({why}); this server encodes alone until it has joined"
            )
            settings["index"] = f"{self._config.index_for_people}{warning}"
        metrics = {"metrics": self.watch.url} if self.watch.url else {}
        rows = {}
        if self._rows_port is not None:
            rows["rows port"] = f"{self._config.rows_listen.rpartition(':')[0]}:{self._rows_port.port}"
        return {**settings, **metrics, **rows, "listening": self.endpoint}

    def _facts(self) -> dict[str, str]:
        return {**self._settings(), "listening": self.endpoint}

    def _settings(self) -> dict[str, str]:
        plan = self._model.facts.plan
        memory = {"device memory": str(plan)} if plan.total else {}
        return {**facts(self._config, self._model, self._device_names, self.replica_id), **memory}

    @property
    def _device_names(self) -> str:
        return ",".join(device.name for device in self._devices)
