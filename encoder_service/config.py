"""The configuration of the server."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from encoder_contract.header import FORMATS
from encoder_contract.settings import ConfigError, Settings, flag, knob

__all__ = ["GIB", "Config", "ConfigError", "flag"]

GIB = 1 << 30
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All settings. Validated on construction: an invalid value raises `ConfigError` at start."""

    environment_prefix = "ENCSVC_"

    model: Path = knob(
        help="folder of a Hugging Face checkpoint (config.json, preprocessor_config.json, *.safetensors)"
    )
    listen: str = knob("127.0.0.1:50051", help="host:port or unix:/path to serve on; port 0 picks a free one")
    advertise: str = knob(
        "",
        help="host:port at which other replicas reach this one; empty: the listening address, or this host's",
    )
    index: str = knob(
        "memory",
        help="index shared by the replicas: memory (a single node) or redis://host:port, rediss://, redis://…?cluster=true",
    )
    index_prefix: str = knob("encoder", help="prefix of all keys in Redis")
    index_timeout_ms: int = knob(100, help="timeout of a call to the index, milliseconds")
    index_at_start: Literal["require", "alone"] = knob(
        "require",
        help="if the index is unavailable at start: require ends with an error, alone starts without it",
    )
    metrics_listen: str = knob(
        "", help="host:port for Prometheus metrics and a status page; port 0 picks a free one; empty: none"
    )
    device: str = knob("auto", help="where the vision tower runs: auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = knob(
        "auto", help="element type of weights and rows; auto uses the checkpoint's"
    )
    attention: Literal["auto", "cudnn", "flash4", "flash3", "varlen", "flash2", "sdpa"] = knob(
        "auto", help="attention backend; auto uses the fastest that is installed"
    )
    batch_invariant: Literal["no", "yes"] = knob(
        "no",
        help="on CUDA, run every image alone, so that its rows never depend, to the bit, on others in the batch; the "
        "CPU always does",
    )
    cuda_graphs: Literal["yes", "no"] = knob(
        "yes", help="capture CUDA graphs at start; no makes starting faster"
    )
    decoder: Literal["auto", "dali", "pillow"] = knob(
        "auto", help="image decoder; auto uses DALI if installed"
    )
    decode_threads: int = knob(
        2, help="threads that decode and preprocess images one by one (DALI's own pool has the same number)"
    )
    decode_pixels: int = knob(
        50_000_000,
        help="source pixels decoded at a time, once in a batch and once one by one; a larger image goes alone",
    )
    torch_threads: int = knob(0, help="threads of a matrix product on the CPU; 0: torch's default")
    batch_patches: int = knob(
        16384, help="patches in one batch of the vision tower; a larger image runs alone"
    )
    store_host_gib: float = knob(2.0, help="host tier of the embedding store, GiB of shared memory")
    store_device_gib: float = knob(
        0.0, help="device tier of the embedding store, GiB of GPU memory; 0 turns it off"
    )
    store_prefault: Literal["yes", "no"] = knob(
        "yes",
        help="touch the store's memory at start, in the background, so that later copies cause no page faults",
    )
    store_segment_dir: Path = knob(Path("/dev/shm"), help="folder of the shared-memory segment")  # noqa: S108
    source_gib: float = knob(0.5, help="submitted image bytes kept to recompute evicted embeddings, GiB")
    source_ttl_s: float = knob(600.0, help="seconds a submitted image is kept after its last use")
    formats: str = knob(
        ",".join(FORMATS), help="image formats accepted, comma-separated; others are INVALID_ARGUMENT"
    )
    max_image_bytes: int = knob(32 << 20, help="largest image file accepted")
    max_image_pixels: int = knob(100_000_000, help="largest width x height accepted, read from the header")
    max_images_per_call: int = knob(512, help="images in one Submit or Fetch call")
    max_calls: int = knob(
        1024, help="calls open at a time, three quarters of them from one host; over it RESOURCE_EXHAUSTED"
    )
    max_queued_images: int = knob(4096, help="images waiting to be encoded; over it RESOURCE_EXHAUSTED")
    max_queued_patches: int = knob(
        16_000_000, help="patches waiting to be encoded; over it RESOURCE_EXHAUSTED"
    )
    max_queued_gib: float = knob(
        1.0, help="image bytes waiting to be encoded, GiB; over it RESOURCE_EXHAUSTED"
    )
    upload_idle_s: float = knob(10.0, help="seconds after which a stalled or very slow upload is ended")
    reader_idle_s: float = knob(
        30.0,
        help="seconds after which a call is ended, and its pins released, if its caller does not read",
    )
    max_queue_s: float = knob(
        30.0, help="seconds the queue may take at the measured rate; over it RESOURCE_EXHAUSTED"
    )
    max_client_share: float = knob(0.75, help="share of the queue that a single client may fill")
    max_waiting_images: int = knob(
        4096,
        help="images that Fetches wait for and that are not submitted yet, three quarters of them for one client; "
        "over it RESOURCE_EXHAUSTED",
    )
    max_pinned_share: float = knob(
        0.9,
        help="share of the host store that running Fetches may keep pinned, three quarters of it for one client; "
        "over it RESOURCE_EXHAUSTED",
    )
    max_grace_ms: int = knob(
        30_000, help="longest time a Fetch may wait for an image that is not submitted yet, milliseconds"
    )
    drain_s: float = knob(30.0, help="seconds for which running calls may finish after SIGTERM")
    hand_over_s: float = knob(
        0.0,
        help="seconds before draining in which other replicas fetch what only this one holds; 0: no handover",
    )
    device_peak_tflops: float = knob(
        0.0,
        help="peak of the device in TFLOP/s at this element type, for the utilisation metric; 0: unknown",
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", help="lowest level that is logged")
    log_format: Literal["console", "json"] = knob("console", help="log format")

    def __post_init__(self) -> None:
        self._require_positive(
            "index_timeout_ms",
            "decode_threads",
            "decode_pixels",
            "batch_patches",
            "max_image_bytes",
            "max_image_pixels",
            "max_images_per_call",
            "max_calls",
            "max_queued_images",
            "max_queued_patches",
            "max_queued_gib",
            "max_queue_s",
            "max_waiting_images",
            "upload_idle_s",
            "reader_idle_s",
            "store_host_gib",
            "source_ttl_s",
        )
        self._require_not_negative(
            "torch_threads",
            "store_device_gib",
            "source_gib",
            "max_grace_ms",
            "drain_s",
            "hand_over_s",
            "device_peak_tflops",
        )
        self._require(0 < self.max_client_share < 1, "max_client_share", "must lie between 0 and 1")
        self._require(0 < self.max_pinned_share < 1, "max_pinned_share", "must lie between 0 and 1")
        known = self.accepted_formats and {*self.accepted_formats} <= {*FORMATS}
        self._require(bool(known), "formats", f"must be some of {', '.join(FORMATS)}")
        self._require_endpoint("listen")
        if self.advertise:
            self._require_endpoint("advertise")
        if self.metrics_listen:
            self._require_endpoint("metrics_listen", tcp=True)
        same = self.listen == self.metrics_listen and not self.listen.endswith(":0")
        self._require(not same, "metrics_listen", f"must not be that of {flag('listen')}")
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        self._require(is_device, "device", "must be auto, cpu, cuda or cuda:N")
        if self.index != "memory" and not _is_redis(self.index):
            raise ConfigError(
                f"{flag('index')} must be memory or redis://host:port and its like, got {self.index_for_people}"
            )

    @property
    def accepted_formats(self) -> tuple[str, ...]:
        """The names in `formats`."""
        return tuple(name for each in self.formats.split(",") if (name := each.strip().upper()))

    @property
    def index_for_people(self) -> str:
        """`index` without the password that its URL may hold: for messages."""
        return without_password(self.index)


def without_password(url: str) -> str:
    """Return `url` without user, password, and the values of options that are passwords."""
    scheme, mark, rest = url.partition("://")
    place, question, options = rest.partition("?")
    if not mark:
        return "***" if {"@", "?"} & set(url) else url
    if "@" in options and "@" not in place:  # ambiguous: a ? in the password, or an @ in an option's password
        return f"{scheme}://***"
    secret, at, host = place.rpartition("@")
    shown = [
        f"{name}=***" if "password" in unquote(name).lower() else f"{name}{equals}{value}"
        for name, equals, value in (option.partition("=") for option in options.split("&"))
    ]
    return f"{scheme}://{'***' if at else secret}{at}{host}{question}{'&'.join(shown)}"


def _is_redis(url: str) -> bool:
    """Return whether `url` is a valid Redis URL: a known scheme, and hosts whose ports are numbers."""
    try:
        parts = urlsplit(url)
        hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
        return parts.scheme in REDIS_SCHEMES and all(host.hostname and host.port != 0 for host in hosts)
    except ValueError:  # an invalid port, or an unbalanced bracket
        return False
