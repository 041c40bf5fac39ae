"""A model that is being served: its devices, queue, cluster, and the facts for calls.

A reload starts a second one beside it, with devices of its own. So an address, its job and the tower that encodes it
always belong to one model, and the first one can finish its calls: see `Server.reload`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING

from encoder_contract.certificates import Certificates
from encoder_contract.errors import (
    EncoderError,
    ImageLimitError,
    InvalidImageError,
    ModelMismatchError,
    UnavailableError,
)
from encoder_contract.fleet_key import FleetKey
from encoder_service.api.caller import Identity
from encoder_service.api.describe import ModelForCalls, ServerInfo, describe
from encoder_service.cluster.cluster import Cluster, Replica
from encoder_service.cluster.peers import SILENCE_S, Peers
from encoder_service.cluster.redis import RedisSettings, namespace
from encoder_service.cluster.redis_cluster import RedisCluster
from encoder_service.config import Config, ConfigError, flag
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.dispatcher import Dispatcher
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.devices.served_model import ServedModel
from encoder_service.image.decoder import DECODE_PIXELS, FileDecoder
from encoder_service.image.sources import VIDEO_LIMITS, SourceCache, Validator
from encoder_service.images import Images
from encoder_service.limits import Budgets
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Scheduler
from encoder_service.store import Pin, Store
from encoder_service.transport import Transports

if TYPE_CHECKING:
    from encoder_service.devices.torch_device import Device

log = logging.getLogger(__name__)

# Most images decoded ahead of the ViT. The limit in patches alone would allow a thousand thumbnails.
MAX_AHEAD_IMAGES = 64
QUIET_S = 2.0
"""A retired model ends once it has had no call for so long: more than between the Submit and the Fetch of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """What the models of a server share."""

    store: Store
    files: FileDecoder
    """Reads headers of rare formats and opens videos. The devices decode."""
    sources: SourceCache
    videos: SourceCache
    budgets: Budgets
    metrics: Metrics
    identity: Identity
    transports: Transports
    replica_id: str
    peer_certificates: Certificates | None
    fleet_key: FleetKey | None
    patience: float
    """See `Server`."""
    on_abort: Callable[[UnavailableError], None]
    """Called when the server cannot encode any more."""


class Serving:
    """One model that is being served. Construct it on the event loop."""

    def __init__(self, config: Config, devices: Sequence[DeviceProcess], parts: ServerParts) -> None:
        """Construct the components. The `devices` have loaded `config.model`."""
        self.config = config
        self.devices = devices
        self._parts = parts
        self.model = ServedModel.of(devices, parts.files)
        self.jobs = self._build_jobs()
        tokens = self.model.geometry.tokens
        self.dispatcher = Dispatcher(devices, self.jobs, parts.store, parts.metrics, tokens)
        self.cluster = self._build_cluster()
        self.images = self._build_images()
        self.served = ModelForCalls(self.images, self._info())
        self.is_retired = False

    @property
    def device_names(self) -> str:
        """The names of the devices, for people."""
        return ",".join(device.name for device in self.devices)

    async def start(self, endpoint: str) -> None:
        """Join the cluster as the replica at `endpoint`, take over the devices, and wait until they are connected.

        Raises `ConfigError` if the index has another model in this one's namespace.
        """
        recipe = self.model.facts.recipe
        replica = Replica(self._parts.replica_id, time_ns(), endpoint, recipe.model, recipe.processor)
        try:
            await self.cluster.join(replica)
        except ModelMismatchError as error:
            raise ConfigError(f"{flag('index')} {self.config.index_for_people}: {error}") from error
        self.dispatcher.start()
        await self.dispatcher.formed()

    def move_to(self, folder: Path) -> None:
        """Have processes of the devices that start later load the same weights from another folder."""
        self.config = replace(self.config, model=folder)
        for device in self.devices:
            device.load_from(folder)

    async def retire(self) -> None:
        """End as a server does that drains, once another model has taken this one's place.

        Calls that are open, and Fetches for them, have `drain_s`. Rows in the store stay there and age out.
        """
        self.is_retired = True
        await run_all(
            partial(self.cluster.hand_over, self.config.hand_over_s),
            self.cluster.leave,
            self._wait_until_unused,
            self.stop,
            self.cluster.close,
        )

    async def stop(self) -> None:
        """Let the devices finish their current images, and fail the queued ones. May be called again."""
        gone = UnavailableError("the server is shutting down, or has other weights now: use another server")
        self.images.unsubmitted.end(gone)
        self.jobs.close()
        await self.dispatcher.stop()
        self.jobs.fail_all(gone)

    async def _wait_until_unused(self) -> None:
        """Wait until no call uses this model and nothing is queued, for at most `drain_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while True:
                    await self.served.wait_idle()
                    await asyncio.sleep(QUIET_S)
                    if self.served.is_idle and not len(self.jobs):
                        return

    # Construction

    def _build_jobs(self) -> JobQueue:
        facts, parts = self.model.facts, self._parts
        return JobQueue(
            Scheduler(
                parts.budgets.queue,
                max_ahead_patches=facts.ahead_patches,
                max_ahead_images=MAX_AHEAD_IMAGES,
                large_pixels=DECODE_PIXELS,
                devices=len(self.devices),
            ),
            self.model.can_batch,
            parts.store,
            loop=asyncio.get_running_loop(),
            metrics=parts.metrics,
            on_end=self._ended,
            device=self._own_device(),
            devices=len(self.devices),
            on_abort=self._aborted,
        )

    def _own_device(self) -> "Device | None":
        """Return the device that this process uses, which it does for a device tier only."""
        if not self.config.store_device_gib:
            return None
        from encoder_service.devices.torch_device import Device  # imports torch

        return Device(self.model.facts.device)

    def _build_cluster(self) -> Cluster:
        config, facts, parts = self.config, self.model.facts, self._parts
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
            parts.store.layout.row_bytes,
            self.model.geometry,
            certificates=parts.peer_certificates,
            name=config.tls_peer_name,
            key=parts.fleet_key,
            on_fetch=parts.metrics.peer_fetch,
            silence_s=SILENCE_S * parts.patience,
        )
        return RedisCluster(
            settings.with_timeouts_scaled(parts.patience),
            peers,
            parts.store,
            on_call=parts.metrics.index_call,
        )

    def _build_images(self) -> Images:
        config, parts = self.config, self._parts
        validator = Validator(
            self.model.geometry,
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            formats=config.accepted_formats,
            read_rare_header=parts.files.read_header,
            open_video=parts.files.open_video,
            video_limits=VIDEO_LIMITS,
            on_hash=partial(parts.metrics.stage, "hash"),
        )
        return Images(
            validator,
            parts.sources,
            parts.videos,
            self.jobs,
            parts.store,
            self.cluster,
            parts.budgets.awaited_images,
        )

    def _info(self) -> ServerInfo:
        parts = self._parts
        return ServerInfo(
            description=describe(self.config, self.model, parts.budgets, parts.replica_id),
            recipe=self.model.facts.recipe,
            geometry=self.model.geometry,
            row_bytes=parts.store.layout.row_bytes,
            transports=parts.transports,
            identity=parts.identity,
        )

    # Callbacks of the components

    def _ended(self, job: Job, outcome: Pin | EncoderError) -> None:
        if isinstance(outcome, EncoderError):
            is_lasting = isinstance(outcome, InvalidImageError) and not isinstance(outcome, ImageLimitError)
            if is_lasting and job.key.frames is None:
                self._parts.sources.drop(job.key.source_key)  # it can never be encoded
            self.cluster.release(job.key.address)
        else:
            self.cluster.publish(job.key.address, outcome.grid)

    def _aborted(self, error: UnavailableError) -> None:
        """End the server, unless another model has taken this one's place."""
        self.images.unsubmitted.end(error)
        if not self.is_retired:
            self._parts.on_abort(error)


async def run_all(*steps: Callable[[], Awaitable[None]]) -> None:
    """Run the steps of a drain in order. Log a step that fails, and run the others all the same."""
    for step in steps:
        try:
            await step()
        except Exception:
            log.exception("while draining")
