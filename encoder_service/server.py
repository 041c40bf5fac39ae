"""The composition root: builds the rooms from a `Config`, strings them together, serves, and drains."""

import asyncio
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.version import __version__
from encoder_service.address import Recipe
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.decode import Decoder
from encoder_service.encoder import Encoder
from encoder_service.fetching import RowFormat
from encoder_service.logs import toggle_debug
from encoder_service.metrics import Metrics, Reading
from encoder_service.pipeline import Pipeline, Stages
from encoder_service.preprocess import to_patches
from encoder_service.processor import ProcessorSettings
from encoder_service.readings import identity_readings, memory_readings, queue_readings, store_readings
from encoder_service.refusals import Refusals
from encoder_service.scheduler import Limits as SchedulerLimits
from encoder_service.scheduler import Scheduler
from encoder_service.service import SERVICE, Edge, EncoderService, generic_handler
from encoder_service.sources import Sources
from encoder_service.store import Store
from encoder_service.vision import Tower, load_tower, model_fingerprint
from encoder_service.vision.spec import read_config as read_config_json
from encoder_service.watch import Watch

log = logging.getLogger(__name__)

LOST_DEVICE = 70  # exit code: the orchestrator starts a fresh process
MAX_MESSAGE_BYTES = 4 << 20  # received; a client's pieces are 1 MiB
# The keepalive pings of clients that want to notice a silent server within two seconds.
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not two servers that share it
)


@dataclass(frozen=True, slots=True)
class Model:
    """What is loaded from the checkpoint folder."""

    tower: Tower
    processor: ProcessorSettings
    recipe: Recipe
    decoder: Decoder
    device: str


def load_model(config: Config) -> Model:
    """Load tower, processor settings and decoder. Raises `ConfigError` naming what is missing or cannot be served."""
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    device = _device(config.device)
    try:
        processor = ProcessorSettings.from_folder(config.model)
        dtype = _dtype(config)
        tower = load_tower(
            config.model,
            device=device,
            dtype=dtype,
            processor=processor,
            attention=config.attention,
            batch_patches=config.batch_patches,
        )
        fingerprint = model_fingerprint(config.model)
        decoder = Decoder(
            device="gpu" if device.startswith("cuda") else "cpu",
            threads=config.decode_threads,
            backend=config.decoder,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
    recipe = Recipe(fingerprint, processor.fingerprint, dtype)
    return Model(tower, processor, recipe, decoder, device)


def _dtype(config: Config) -> str:
    """Return the element type to use: the checkpoint's own unless one was asked for."""
    if config.dtype != "auto":
        return config.dtype
    content = read_config_json(config.model)
    for part in (content, content.get("text_config") or {}):
        if found := part.get("dtype") or part.get("torch_dtype"):
            return str(found)
    return "bfloat16"


def _device(name: str) -> str:
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch {torch.__version__} sees no CUDA device; use --device cpu")
    return name


class Server:
    """One serving process."""

    def __init__(self, config: Config, model: Model) -> None:
        self._config = config
        self._model = model
        self.replica_id = uuid4().hex[:12]
        self.metrics = Metrics()
        self.port = 0
        self._stop = asyncio.Event()
        self._lost_device = False

    async def serve(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain: refuse new calls, finish what runs; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGUSR1, toggle_debug, self._config.log_level)
        await self.start()
        print(self.banner(), flush=True)  # noqa: T201 - the one block that says what was chosen
        await self._stop.wait()
        await self.drain()
        return LOST_DEVICE if self._lost_device else 0

    async def start(self) -> None:
        """Build the rooms and listen. Raises `ConfigError` when the store or the port cannot be had."""
        config, model = self._config, self._model
        spec = model.tower.spec
        geometry = model.processor.geometry
        self.store = Store(
            host_bytes=int(config.store_host_gib * GIB),
            device_bytes=int(config.store_device_gib * GIB),
            device=model.device,
            width=spec.width,
            dtype=model.tower.dtype,
            segment_dir=str(config.store_segment_dir),
        )
        refusals = Refusals()
        self._limits = SchedulerLimits(
            images=config.max_queued_images,
            patches=config.max_queued_patches,
            source_bytes=int(config.max_queued_gib * GIB),
            claims=16 * config.max_queued_images,
            client_share=config.max_client_share,
        )
        self._sources = Sources(int(config.source_gib * GIB), config.source_ttl_s)
        self.pipeline = Pipeline(
            Scheduler(
                self._limits,
                max_ahead_patches=2 * config.batch_patches,
                max_ahead_images=64,
            ),
            Stages(
                decode=model.decoder.decode,
                to_patches=partial(to_patches, geometry=geometry),
                encode=model.tower.encode,
                put=self.store.put,
                pin=self.store.pin,
            ),
            loop=asyncio.get_running_loop(),
            batch_patches=config.batch_patches,
            device=model.device,
            metrics=self.metrics,
            on_failure=refusals.note,
            on_lost_device=self._lose_device,
        )
        encoder = Encoder(
            recipe=model.recipe,
            geometry=geometry,
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            sources=self._sources,
            pipeline=self.pipeline,
            store=self.store,
            refusals=refusals,
            metrics=self.metrics,
        )
        self._description = self._describe()
        self.service = EncoderService(encoder, self._edge(), self.metrics)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((generic_handler(self.service),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self.port = self._listen(self._server)
        self.watch = Watch(
            config.metrics_listen,
            self.metrics,
            self._readings,
            title=f"encoder-service {__version__}",
            facts=self._facts(),
            draining=lambda: self.service.draining,
        )
        self.watch.start()
        self.pipeline.start()
        await self._server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Refuse new calls, let running ones end (at most `drain_s`), stop the threads, give the memory back."""
        log.info("draining: new calls are refused, running ones have %g s", self._config.drain_s)
        self.service.draining = True
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._config.drain_s)
        await asyncio.to_thread(self.pipeline.stop)
        await asyncio.to_thread(self.watch.stop)
        self.store.close()
        log.info("drained")

    def _lose_device(self) -> None:
        self._lost_device = True
        self._stop.set()

    def _listen(self, server: grpc.aio.Server) -> int:
        try:
            return server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {self._config.listen}: the address is taken or not ours; port 0 takes a free one"
            ) from error

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
        yield from queue_readings(self.pipeline.snapshot(), self._limits)
        yield from store_readings(self.store.stats())
        yield from memory_readings(self.store.segment.path, self._sources, self.service.held_upload_bytes)

    def _describe(self) -> pb.DescribeResponse:
        config, model = self._config, self._model
        spec, geometry = model.tower.spec, model.processor.geometry
        return pb.DescribeResponse(
            version=__version__,
            model_type=spec.model_type,
            model_name=config.model.resolve().name,
            model_fingerprint=model.recipe.model,
            processor_fingerprint=model.recipe.processor,
            dtype=model.recipe.dtype,
            width=spec.width,
            hidden=spec.hidden,
            deepstack_levels=spec.levels,
            geometry=pb.Geometry(
                patch_size=geometry.patch_size,
                merge_size=geometry.merge_size,
                min_pixels=geometry.min_pixels,
                max_pixels=geometry.max_pixels,
            ),
            limits=pb.Limits(
                max_image_bytes=config.max_image_bytes,
                max_image_pixels=config.max_image_pixels,
                max_images_per_call=config.max_images_per_call,
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_grace_ms=config.max_grace_ms,
            ),
            replica_id=self.replica_id,
        )

    def _edge(self) -> Edge:
        config, model = self._config, self._model
        spec = model.tower.spec
        return Edge(
            description=self._description,
            geometry=model.processor.geometry,
            rows=RowFormat(spec.width, model.recipe.dtype, spec.width * model.tower.dtype.itemsize),
            segment=str(self.store.segment.path),
            segment_id=self.store.segment.segment_id,
            max_upload_bytes=int(config.max_queued_gib * GIB),
        )

    def banner(self) -> str:
        """Return the block that says what was chosen."""
        lines = self._facts()
        if self.watch.endpoint:
            lines["metrics"] = f"http://{self.watch.endpoint}/"
        # Last: whoever waits for the server to be up waits for this line.
        lines["listening"] = self.endpoint
        width = max(map(len, lines))
        return "\n".join(
            [f"encoder-service {__version__}", *(f"  {k:<{width}}  {v}" for k, v in lines.items())]
        )

    def _facts(self) -> dict[str, str]:
        config, model = self._config, self._model
        spec, geometry = model.tower.spec, model.processor.geometry
        return {
            "model": f"{config.model} ({spec.model_type}, {model.recipe.model.hex()[:12]})",
            "device": f"{model.device}, {model.recipe.dtype}, attention {model.tower.attention}",
            "decoder": model.decoder.name,
            "rows": f"{spec.width} wide ({spec.hidden} x {1 + spec.levels})",
            "geometry": f"patch {geometry.patch_size}, merge {geometry.merge_size}, "
            f"{geometry.min_pixels} to {geometry.max_pixels} pixels",
            "limits": f"{config.max_image_bytes >> 20} MiB and {config.max_image_pixels / 1e6:g} megapixels an image, "
            f"{config.max_queued_images} images queued",
            "store": f"{config.store_host_gib:g} GiB host, {config.store_device_gib:g} GiB device, "
            f"{config.source_gib:g} GiB of image files",
            "replica": self.replica_id,
            "listening": self.endpoint,
        }

    @property
    def endpoint(self) -> str:
        """Where this server is reached: host:port or unix:path."""
        listen = self._config.listen
        return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{self.port}"
