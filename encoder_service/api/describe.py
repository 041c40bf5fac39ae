"""What a server says about itself: to its calls, in the Describe response, in the banner, on the status page."""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from encoder_contract.endpoint import is_ip
from encoder_contract.errors import ModelMismatchError
from encoder_contract.geometry import GridRule
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.version import __version__
from encoder_service.api import messages
from encoder_service.api.caller import Identity
from encoder_service.config import Config
from encoder_service.devices.served_model import ServedModel
from encoder_service.image.sources import VIDEO_LIMITS
from encoder_service.images import Images
from encoder_service.keys import Recipe
from encoder_service.limits import MAX_IMAGES_PER_CALL, Budgets
from encoder_service.transport import Transports


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The facts about the server that calls need: description, limits, transports, rights."""

    description: pb.DescribeResponse
    recipe: Recipe
    geometry: GridRule
    row_bytes: int
    transports: Transports
    identity: Identity
    max_images: int = MAX_IMAGES_PER_CALL
    """The most images that one call may name."""

    def check_model(self, caller: pb.Caller) -> None:
        """Raise `ModelMismatchError` if the caller is for another model or processor than this server has."""
        for kind, expected, ours in (
            ("model", caller.model_fingerprint, self.description.model_fingerprint),
            ("processor", caller.processor_fingerprint, self.description.processor_fingerprint),
        ):
            if expected and expected != ours:
                raise ModelMismatchError(
                    f"{kind} fingerprint: the call is for {expected.hex()}, this server has {ours.hex()}: call a "
                    f"server with the same {kind}"
                )


class ModelForCalls:
    """A model as calls see it, and whether calls use it. Use from one event loop."""

    def __init__(self, images: Images, info: ServerInfo) -> None:
        self.images = images
        self.info = info
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count a call, for as long as it lasts."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether no call uses the model."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Wait until no call uses the model."""
        await self._idle.wait()


def describe(config: Config, model: ServedModel, budgets: Budgets, replica_id: str) -> pb.DescribeResponse:
    """Return the Describe response."""
    loaded = model.facts
    return pb.DescribeResponse(
        version=__version__,
        model_type=loaded.model_type,
        model_name=config.model.resolve().name,
        model_fingerprint=loaded.recipe.model,
        processor_fingerprint=loaded.recipe.processor,
        dtype=loaded.recipe.dtype,
        width=loaded.width,
        hidden=loaded.hidden,
        deepstack_levels=loaded.levels,
        geometry=messages.geometry_message(model.geometry),
        limits=pb.Limits(
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            max_images_per_call=MAX_IMAGES_PER_CALL,
            max_message_bytes=messages.PIECE_BYTES,
            max_grace_ms=budgets.max_grace_ms,
            max_video_bytes=config.largest_video_bytes if loaded.videos else 0,
            max_video_frames=VIDEO_LIMITS.frames if loaded.videos else 0,
            max_video_seconds=VIDEO_LIMITS.seconds if loaded.videos else 0.0,
        ),
        replica_id=replica_id,
        video_decoder=loaded.videos,
    )


def facts(config: Config, model: ServedModel, devices: str, replica_id: str) -> dict[str, str]:
    """Return the settings in effect, as text."""
    loaded = model.facts
    return {
        "model": f"{config.model} ({loaded.model_type}, {loaded.recipe.model.hex()[:12]})",
        "fingerprint": loaded.recipe.model.hex(),
        "device": f"{devices}, {loaded.recipe.dtype}, attention {loaded.attention}",
        "decoder": loaded.decoder,
        "videos": loaded.videos or f"none: {loaded.no_videos}",
        "rows": f"{loaded.width} wide ({loaded.hidden} x {1 + loaded.levels})",
        "geometry": str(model.geometry),
        "limits": f"{config.max_image_bytes >> 20} MiB and {config.max_image_pixels / 1e6:g} megapixels an image, "
        f"{config.max_queued_images} images queued",
        "store": f"{config.store_host_gib:g} GiB host, {config.store_device_gib:g} GiB device, "
        f"{config.source_gib:g} GiB of image files",
        "disk": f"{config.store_disk_gib:g} GiB in {config.store_disk}" if config.store_disk else "none",
        "access": f"{_tls(config)}, {'' if config.tenants_file else 'no '}tenants, "
        f"{'' if config.fleet_key_file else 'no '}fleet key",
        "replica": replica_id,
    }


def _tls(config: Config) -> str:
    if not config.tls_cert:
        return "no TLS"
    return "TLS with client certificates" if config.tls_client_ca else "TLS"


def banner(facts: Mapping[str, str]) -> str:
    """Return the text that a server prints at start."""
    width = max(map(len, facts))
    return "\n".join(
        [f"encoder-service {__version__}", *(f"  {name:<{width}}  {value}" for name, value in facts.items())]
    )


def reachable(endpoint: str, advertise: str = "") -> str:
    """Return where other replicas reach a server that listens at `endpoint`: at `advertise`, if that is set.

    An IP address gets the port of `endpoint`. Without `advertise`, this host's address replaces the wildcard address.
    """
    host, _, port = endpoint.rpartition(":")
    if is_ip(advertise):
        return f"[{advertise}]:{port}" if ":" in advertise else f"{advertise}:{port}"
    if advertise:
        return advertise
    if host not in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
        return endpoint
    try:
        return f"{socket.gethostbyname(socket.gethostname())}:{port}"
    except OSError:
        return f"{socket.gethostname()}:{port}"  # peers may still resolve the name
