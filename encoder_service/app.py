"""The composition root: construct and wire the components from a `Config`, serve, and drain."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from encoder_contract.command_line import say
from encoder_contract.endpoint import is_local
from encoder_contract.errors import (
    ModelMismatchError,
    OverloadedError,
    UnavailableError,
)
from encoder_contract.version import __version__
from encoder_service import signals
from encoder_service.api.admin import AdminService, Step
from encoder_service.api.caller import Identity
from encoder_service.api.describe import banner, facts, reachable
from encoder_service.api.server import Listener
from encoder_service.api.service import EncoderService
from encoder_service.api.tenants import read_tenants
from encoder_service.cluster.cluster import Cluster, IndexState
from encoder_service.cluster.tasks import FAILED_TASK, cancel_task, start_task
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
from encoder_service.devices.job_queue import JobQueue
from encoder_service.devices.served_model import ServedModel
from encoder_service.http import Watch
from encoder_service.image.decoder import FileDecoder
from encoder_service.image.sources import SOURCE_TTL_S, SourceCache
from encoder_service.images import Images
from encoder_service.limits import Budgets
from encoder_service.logs import toggle_debug
from encoder_service.metrics import Metrics, Reading
from encoder_service.reload import checkpoint_path, load_beside
from encoder_service.rows_port import RowsPort
from encoder_service.scheduler import Snapshot
from encoder_service.serving import ServerParts, Serving, run_all
from encoder_service.store import AnyTier, DiskError, Store, StoreSizeError
from encoder_service.transport import Transports

log = logging.getLogger(__name__)

EXIT_S = 30.0  # seconds after `drain_s` at which the process exits in any case: something may hang
SNAPSHOT_S = 10.0  # how long a scrape waits for the event loop
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
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._aborted = self._is_ending = self._is_reloading = False
        self.replica_id = uuid4().hex[:12]
        self._certificates = config.certificates()
        self._peer_certificates = config.peer_certificates()
        self._fleet_key = config.fleet_key()
        self._tenants = read_tenants(config)
        self._identity = Identity(self._tenants, self._fleet_key)
        self.endpoint = ""  # host:port or unix:path, set by `start`
        self.metrics = Metrics()
        self.store = self._build_store(devices)
        self._sources = SourceCache(int(config.source_gib * GIB), SOURCE_TTL_S)
        self._videos = SourceCache(int(config.video_gib * GIB), SOURCE_TTL_S, max_files=MAX_VIDEOS)
        self.budgets = budgets or Budgets.of(config)
        self._rows_port = self._build_rows_port()
        self._parts = self._build_parts(files, patience)
        self.serving = Serving(config, devices, self._parts)
        self.service = EncoderService(self.serving.served, self.metrics, self.budgets)
        self._loading: asyncio.Task[list[DeviceProcess]] | None = None
        self._retired: Serving | None = None  # the model before, while it ends
        self._retiring: asyncio.Task[None] | None = None

    @property
    def _servings(self) -> list[Serving]:
        """The model that new calls get, and the one before while it ends."""
        return [self.serving] if self._retired is None else [self.serving, self._retired]

    @property
    def model(self) -> ServedModel:
        """The model that new calls get."""
        return self.serving.model

    @property
    def jobs(self) -> JobQueue:
        """Its queue."""
        return self.serving.jobs

    @property
    def dispatcher(self) -> Dispatcher:
        """Its devices."""
        return self.serving.dispatcher

    @property
    def cluster(self) -> Cluster:
        """The replicas that serve it."""
        return self.serving.cluster

    @property
    def images(self) -> Images:
        """What happens to its images."""
        return self.serving.images

    async def serve(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGQUIT, then drain. Return the exit code."""
        signals.handle(
            self._loop,
            drain=self._stop.set,
            interrupt=self._interrupt,
            reload=self._read_again,
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
        admin = AdminService(self.store, self._sources, self._videos, self.reload, self._identity)
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
                facts=self._facts,
                certificates=self._certificates,
                check_reader=None if is_local(self._config.metrics_listen) else self._identity.check_reader,
            )
            self._identity.advertised = reachable(self.endpoint, self._config.advertise)
            await self.serving.start(self._identity.advertised)
        except ConfigError:
            await self._stop_rows_port()
            self.store.close()
            raise
        threading.Thread(target=self._keep_moving, name="tier-migrator", daemon=True).start()
        self.watch.start()
        await self._listener.start()

    async def drain(self) -> None:
        """Hand over rows, refuse new calls, leave the index, wait `drain_s` for running calls, free everything."""
        self._is_ending = True
        if self._loading is not None:
            self._loading.cancel()
        await run_all(
            partial(self.cluster.hand_over, 0.0 if self._aborted else self._config.hand_over_s),
            self._refuse_new_calls,
            self.cluster.leave,
            partial(self._listener.stop, self._config.drain_s),
            self._stop_serving,
            self.watch.stop,
            self._stop_rows_port,
            partial(asyncio.to_thread, self.store.close),
        )
        log.info("drained")

    async def reload(self, folder: str) -> AsyncGenerator[Step]:
        """Serve the checkpoint in `folder`, an absolute path, from now on; yield the steps.

        Raises `OverloadedError` during another reload, `ModelMismatchError` if the folder cannot be served beside the
        one that is, or instead of it, and `UnavailableError` during a drain.
        """
        if self._is_reloading:
            raise OverloadedError("another reload is running: wait until it has ended")
        self._is_reloading = True
        try:
            path = await asyncio.to_thread(checkpoint_path, folder)
            if self._retiring is not None and not self._retiring.done():
                yield Step("waiting for the calls that the weights before still have")
                await asyncio.wait({self._retiring})
            count = len(self.serving.devices)
            yield Step(f"loading {path} on {count} {'device' if count == 1 else 'devices'}")
            new = await self._loaded(path)
            if new is not None:
                self._swap(new)
        except ConfigError as error:
            why = " ".join(str(error).split())
            log.warning("not reloaded, the server goes on as before: %s", why)
            raise ModelMismatchError(f"not reloaded, the server goes on as before: {why}") from error
        finally:
            self._is_reloading = False
        fingerprint = self.model.facts.recipe.model
        change = "new calls get it" if new is not None else "its weights were served already"
        log.info("reloaded %s: %s, model fingerprint %s", path, change, fingerprint.hex())
        yield Step(f"serving {path}: {change}, model fingerprint {fingerprint.hex()}", fingerprint)

    async def _loaded(self, path: Path) -> Serving | None:
        """Return the model in a folder, ready to serve; None if it is the one that is served.

        Raises as `reload` does, and `ConfigError`.
        """
        config = replace(self.serving.config, model=path)
        self._require_running()
        self._loading = asyncio.create_task(load_beside(config, self.model.facts), name="reload")
        try:
            devices = await self._loading
        except asyncio.CancelledError:
            self._require_running()
            raise
        if not devices:
            self.serving.move_to(path)
            return None
        new = Serving(config, devices, self._parts)
        try:
            await new.start(self._identity.advertised)
            self._require_running()
        except BaseException:
            await run_all(new.stop, new.cluster.close)
            raise
        return new

    def _require_running(self) -> None:
        if self._is_ending:
            raise UnavailableError("the server is draining, and does not reload")

    def _swap(self, new: Serving) -> None:
        """Have new calls get another model; the one before ends its own."""
        self._retired, self.serving = self.serving, new
        self._retired.dispatcher.on_answers = lambda _answers: None
        new.dispatcher.on_answers = self._listener.set_serving
        self._listener.set_serving(True)
        self.service.serve(new.served)
        self._retiring = start_task(self._retire(self._retired), "retire")

    async def _retire(self, old: Serving) -> None:
        await old.retire()
        self.service.end_retired()
        self._retired = None

    async def _stop_serving(self) -> None:
        await cancel_task(self._retiring)
        await asyncio.gather(*(run_all(each.stop, each.cluster.close) for each in self._servings))

    async def _refuse_new_calls(self) -> None:
        log.info(
            "draining: running calls have %g s to finish; press Ctrl-C again to end them now",
            self._config.drain_s,
        )
        self.service.draining = True
        for serving in self._servings:
            serving.images.unsubmitted.end_keeping(
                UnavailableError("the server is draining: use another server")
            )

    async def _stop_rows_port(self) -> None:
        if self._rows_port is not None:
            await asyncio.to_thread(self._rows_port.stop)

    # Construction

    def _build_store(self, devices: Sequence[DeviceProcess]) -> Store:
        config, facts = self._config, devices[0].facts
        if config.store_device_gib:
            _require_access(devices, facts.device)
        try:
            return Store(
                host_bytes=int(config.store_host_gib * GIB),
                device_bytes=int(config.store_device_gib * GIB),
                device=facts.device,
                row_bytes=facts.row_bytes,
                segment_dir=str(config.store_segment_dir),
                on_evict=self._on_evict,
                prefault=True,
                disk_folder=Path(config.store_disk) if config.store_disk else None,
                disk_bytes=int(config.store_disk_gib * GIB),
                disk_key=self._fleet_key,
            )
        except (StoreSizeError, DiskError) as error:
            raise ConfigError(str(error)) from error

    def _build_rows_port(self) -> RowsPort | None:
        listen = self._config.rows_listen
        return RowsPort(listen, self._certificates, self.budgets.reader_idle_s) if listen else None

    def _build_parts(self, files: FileDecoder, patience: float) -> ServerParts:
        return ServerParts(
            store=self.store,
            files=files,
            sources=self._sources,
            videos=self._videos,
            budgets=self.budgets,
            metrics=self.metrics,
            identity=self._identity,
            transports=Transports(self.store, self._rows_port),
            replica_id=self.replica_id,
            peer_certificates=self._peer_certificates,
            fleet_key=self._fleet_key,
            patience=patience,
            on_abort=self._abort,
        )

    # Callbacks of the components

    def _keep_moving(self) -> None:
        try:
            self.store.moves.keep_moving()
        except BaseException as error:  # noqa: BLE001 - a thread never ends silently
            self.jobs.abort("the server's thread tier-migrator died", error)

    def _on_evict(self, address: bytes, _tier: AnyTier) -> None:
        """Report the eviction to the event loop. Called on the thread that evicted."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._evicted, address)

    def _evicted(self, address: bytes) -> None:
        if not self.store.contains(address):
            for serving in self._servings:
                serving.cluster.retract(address)

    def _interrupt(self) -> None:
        if self._stop.is_set() and self.endpoint:
            self._listener.abort_calls()
        self._stop.set()

    def _read_again(self) -> None:
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
        serving = self.serving
        peak_flops = self._config.device_peak_tflops * 1e12 * len(serving.devices)
        description = serving.served.info.description
        yield from identity_readings(description, serving.model.facts, serving.device_names, peak_flops)
        yield from process_readings(self.draining)
        peers = self._peer_certificates if self._config.tls_peer_ca else None
        yield from certificate_readings(self._certificates, peers)
        yield from device_readings(serving.devices)
        yield from model_readings(self._parts.files, serving.devices)
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
        serving, plan = self.serving, self.model.facts.plan
        memory = {"device memory": str(plan)} if plan.total else {}
        return {**facts(serving.config, serving.model, serving.device_names, self.replica_id), **memory}


def _require_access(devices: Sequence[DeviceProcess], to: str) -> None:
    """Raise `ConfigError` if a device cannot write to memory of the device `to`."""
    from encoder_service.devices.torch_device import Device  # imports torch

    for device in devices:
        if not Device(device.name).can_access(to):
            raise ConfigError(
                f"{flag('store_device_gib')}: {device.name} cannot write to the device tier on {to}: they have no peer "
                "access (`nvidia-smi topo -p2p r`). Set it to 0, or start a server on each GPU"
            )
