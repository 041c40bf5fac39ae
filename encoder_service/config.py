"""The configuration of the server."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit

from encoder_contract.certificates import Certificates
from encoder_contract.endpoint import Endpoint, is_ip, is_local
from encoder_contract.fleet_key import FleetKey
from encoder_contract.header import FORMATS, RARE_FORMATS
from encoder_contract.settings import ConfigError, Settings, flag, knob

__all__ = ["GIB", "Config", "ConfigError", "flag"]

GIB = 1 << 30
MAX_VIDEO_BYTES = 256 << 20  # a video file
# Bounds of settings that are whole numbers, by what each costs.
MAX_DECODE_THREADS = 256  # of a device; each starts a process
MAX_CALLS = 65_536  # open, of a kind; each takes 40 KB besides what it sends
MAX_QUEUED_IMAGES = 1_000_000  # each takes 2.7 KB besides its file, and 1.3 KB for each further caller
MAX_IMAGE_BYTES = GIB  # a file is in memory twice: in the server, and in a decoder process
MAX_IMAGE_PIXELS = 1_000_000_000  # each takes 28 bytes while it is decoded
MAX_CALL_WINDOW_KIB = (2 << 20) - 1  # gRPC takes less than 2 GiB
MAX_INDEX_TIMEOUT_MS = 60_000  # while Redis is silent, each new image waits for it
QUEUED_PATCHES = 16_000_000  # that all images in the queue may have: 3,900 images of 1024x1024 pixels
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All settings. Construction checks them: an invalid value raises `ConfigError`."""

    environment_prefix = "ENCSVC_"
    headings: ClassVar = {
        "model": "Model and ports",
        "tls_cert": "TLS and callers",
        "advertise": "Replicas",
        "devices": "Encoding",
        "decoder": "Decoding",
        "store_host_gib": "Store",
        "formats": "Limits",
        "drain_s": "Shutdown",
        "device_peak_tflops": "Monitoring and log",
    }

    model: Path = knob(
        help="folder of a Hugging Face checkpoint (config.json, preprocessor_config.json, *.safetensors)"
    )
    trust_remote_code: Literal["no", "yes"] = knob(
        "no",
        help="yes: run the Python code in the checkpoint, for a model that transformers does not include; the code "
        "runs with all rights of the server, so you must trust its author (SECURITY.md)",
    )
    listen: str = knob(
        "127.0.0.1:50051", help="address to serve gRPC on: host:port or unix:/path; port 0 picks a free port"
    )
    listen_unprotected: Literal["no", "yes"] = knob(
        "no",
        help="yes: serve other hosts without TLS; use it only on a network that no untrusted host can reach or read",
    )
    metrics_listen: str = knob(
        "",
        help="host:port to serve Prometheus metrics, probes and a status page on; port 0 picks a free port; empty: no "
        "HTTP port",
    )
    rows_listen: str = knob(
        "",
        help="host:port to send rows on, over TCP connections beside the calls, for a fraction of the processor time; "
        "with the TLS settings of --listen; port 0 picks a free port; empty: rows are sent inline to other hosts",
    )
    tls_cert: str = knob("", help="PEM file with the server's certificate chain; empty: no TLS")
    tls_key: str = knob("", help="PEM file with the private key of --tls-cert, unencrypted")
    tls_client_ca: str = knob(
        "",
        help="PEM file of the authorities that issue client certificates; if set, gRPC callers must present such a "
        "certificate (mutual TLS)",
    )
    tls_peer_ca: str = knob(
        "",
        help="PEM file of the authorities that issue the other replicas' certificates; empty: the authorities in "
        "--tls-client-ca, or the public ones if that is empty too",
    )
    tls_peer_name: str = knob(
        "",
        help="name to expect in the other replicas' certificates; empty: the host name that each replica advertises",
    )
    fleet_key_file: str = knob(
        "",
        help="file with the secret of all replicas, a line of at least 32 characters, with which they sign rows; "
        "further lines: older secrets, still accepted; empty: nothing is signed",
    )
    tenants_file: str = knob(
        "",
        help="TOML file of the tenants, with their tokens, certificates and rights; the server refuses all other "
        "callers; empty: it serves all callers",
    )
    advertise: str = knob(
        "",
        help="host:port at which other replicas reach this one, or an IP address, with the port of --listen; empty: "
        "the address of --listen, or this host's address if --listen names all interfaces",
    )
    index: str = knob(
        "memory",
        help="index that the replicas share: the URL of a Redis (redis://host:port, rediss://, redis+cluster://), or "
        "memory for a single replica",
    )
    index_prefix: str = knob("encoder", help="prefix of every key in Redis")
    index_timeout_ms: int = knob(
        100, most=MAX_INDEX_TIMEOUT_MS, help="timeout of one call to the index, milliseconds"
    )
    devices: str = knob(
        "auto",
        help="devices that run the vision tower, comma-separated: cpu, cuda or cuda:N; each gets its own process; "
        "auto: a GPU if there is one, else the CPU",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = knob(
        "auto", help="element type of weights and rows; auto: that of the checkpoint"
    )
    attention: Literal["auto", "flash3", "varlen", "flash2", "sdpa"] = knob(
        "auto",
        help="attention backend; auto: the first of flash3, varlen, flash2 and sdpa that passes a trial at start; "
        "the server does not start with another one that cannot run",
    )
    batch_invariant: Literal["no", "yes"] = knob(
        "no",
        help="yes: encode each image in its own batch on CUDA, so that its rows do not depend on the other images in "
        "the queue; on the CPU they never do",
    )
    cuda_graphs: Literal["yes", "no"] = knob(
        "yes", help="yes: capture CUDA graphs at start; no: start faster and encode slower"
    )
    batch_patches: int = knob(
        0,
        zero=True,
        most=QUEUED_PATCHES,
        help="maximum patches in a batch of the vision tower; a larger image runs alone; 0: 5632 on a GPU, 1024 on the "
        "CPU; if set, larger images have no CUDA graphs",
    )
    decoder: Literal["auto", "dali", "pillow"] = knob(
        "auto", help="image decoder; auto: DALI on a GPU if it is installed, else Pillow"
    )
    decoder_process: Literal["auto", "yes", "no"] = knob(
        "auto",
        help="which images to decode in separate processes without access to files and network; auto: all but the "
        "JPEGs that DALI decodes on a GPU; yes: all, on the CPU; no: none",
    )
    decode_threads: int = knob(
        0,
        zero=True,
        most=MAX_DECODE_THREADS,
        help="threads that decode and preprocess single images, each with its own decoder process; also the threads in "
        "DALI's pool; 0: 8 with a GPU, 2 without",
    )
    store_host_gib: float = knob(2.0, help="size of the store's host tier, GiB of shared memory")
    store_device_gib: float = knob(
        0.0, zero=True, help="size of the store's device tier, GiB of GPU memory; 0: no device tier"
    )
    store_segment_dir: Path = knob(Path("/dev/shm"), help="folder for the store's shared-memory file")  # noqa: S108
    store_disk: str = knob(
        "",
        help="folder on a local disk for embeddings that leave the host tier; a restart finds them again; one for each "
        "server; empty: none",
    )
    store_disk_gib: float = knob(100.0, help="size of the store's files in --store-disk, GiB")
    source_gib: float = knob(
        0.5,
        zero=True,
        help="size of the cache of image files, GiB, to encode evicted embeddings again; 0: no cache",
    )
    formats: str = knob(
        "all",
        help="accepted image formats, comma-separated; others are refused with INVALID_ARGUMENT; all: "
        f"{', '.join(FORMATS)}, and the other formats that Pillow reads without plug-ins: {', '.join(RARE_FORMATS)}",
    )
    max_image_bytes: int = knob(32 << 20, most=MAX_IMAGE_BYTES, help="largest accepted image file, bytes")
    max_image_pixels: int = knob(
        100_000_000,
        most=MAX_IMAGE_PIXELS,
        help="largest accepted image, pixels (width x height in its header)",
    )
    video: Literal["auto", "yes", "no"] = knob(
        "auto",
        help="accept videos; auto: if OpenCV is installed (pip install 'encoder-service[video]') and the server has "
        "its own tower for the model; yes: refuse to start without them; no: never",
    )
    video_gib: float = knob(
        1.0,
        help="size of the cache of video files, GiB",
    )
    max_calls: int = knob(
        1024,
        most=MAX_CALLS,
        help="maximum number of open calls (Submit is counted separately); one host may use 75 %; more are "
        "refused with RESOURCE_EXHAUSTED",
    )
    call_window_kib: int = knob(
        4096,
        most=MAX_CALL_WINDOW_KIB,
        help="what a caller may send on a call before the server reads it, KiB; less saves memory under attack, and "
        "slows uploads from far hosts: each takes a round trip for every window, or for 1 MiB if that is more",
    )
    max_queued_images: int = knob(
        4096,
        most=MAX_QUEUED_IMAGES,
        help="maximum number of queued images; more are refused with RESOURCE_EXHAUSTED",
    )
    max_queued_gib: float = knob(
        1.0,
        help="maximum size of all queued image files, GiB; more are refused with RESOURCE_EXHAUSTED",
    )
    max_queue_s: float = knob(
        30.0,
        help="maximum length of the queue, seconds at the measured rate; more images are refused with "
        "RESOURCE_EXHAUSTED",
    )
    drain_s: float = knob(30.0, zero=True, help="seconds that open calls have to finish after SIGTERM")
    hand_over_s: float = knob(
        0.0,
        zero=True,
        help="seconds before the drain in which other replicas copy this one's unique rows; 0: no handover",
    )
    device_peak_tflops: float = knob(
        0.0,
        zero=True,
        help="peak speed of one device at --dtype, TFLOP/s, for the utilisation metric; 0: no such metric",
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", help="lowest level to log")
    log_format: Literal["console", "json"] = knob(
        "console", help="format of log lines: console (text) or json (one object per line)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.accepted_formats and {*self.accepted_formats} <= {*FORMATS, *RARE_FORMATS}
        self._require(
            bool(known), "formats", f"must be all, or a list of {', '.join((*FORMATS, *RARE_FORMATS))}"
        )
        self._require_endpoint("listen")
        if self.advertise and not is_ip(self.advertise):
            self._require_endpoint("advertise", parse=Endpoint.of_server)
        if self.metrics_listen:
            self._require_endpoint("metrics_listen", tcp=True)
        self._check_tls()
        if self.rows_listen:
            self._require_endpoint("rows_listen", tcp=True)
        for name, others in (("metrics_listen", ["listen"]), ("rows_listen", ["listen", "metrics_listen"])):
            for other in others:
                address = getattr(self, name)
                same = address == getattr(self, other) and address and not address.endswith(":0")
                self._require(not same, name, f"must differ from {flag(other)}")
        self._check_devices()
        if self.index != "memory" and not _is_redis(self.index):
            raise ConfigError(
                f"{flag('index')} must be memory or a Redis URL such as redis://host:port, got {self.index_for_people}"
            )

    @property
    def device_names(self) -> list[str]:
        """The names in `devices`; `cuda` is `cuda:0`."""
        names = [name.strip() for name in self.devices.split(",")]
        return ["cuda:0" if name == "cuda" else name for name in names]

    def _check_devices(self) -> None:
        names = self.device_names
        are_devices = all(re.fullmatch(r"cpu|cuda:\d+", name) for name in names) or names == ["auto"]
        self._require(
            are_devices, "devices", "must be auto, or a comma-separated list of cpu, cuda or cuda:N"
        )
        gpus = [name for name in names if name != "cpu"]
        self._require(gpus in ([], names), "devices", "must not mix the CPU with GPUs")
        self._require(len(set(gpus)) == len(gpus), "devices", "must name each GPU once")
        cores = len(os.sched_getaffinity(0))
        self._require(
            bool(gpus) or len(names) <= cores,
            "devices",
            f"must name cpu at most {cores} times, once for each core",
        )

    def certificates(self) -> Certificates | None:
        """Read our certificate and the authorities of clients; None without TLS. Raises `ConfigError`."""
        return self._read_certificates(self.tls_client_ca)

    def peer_certificates(self) -> Certificates | None:
        """Read our certificate and the authorities of the other replicas; None without TLS. Raises `ConfigError`."""
        return self._read_certificates(self.tls_peer_ca or self.tls_client_ca)

    @property
    def largest_video_bytes(self) -> int:
        """The largest video file that fits into the cache and the budget of uploads."""
        return min(MAX_VIDEO_BYTES, int(self.video_gib * GIB), int(self.max_queued_gib * GIB))

    def fleet_key(self) -> FleetKey | None:
        """Read the fleet's key; None if none is set. Raises `ConfigError`."""
        try:
            return FleetKey.read(self.fleet_key_file) if self.fleet_key_file else None
        except ValueError as error:
            raise ConfigError(f"{flag('fleet_key_file')}: {error}") from error

    def _read_certificates(self, ca: str) -> Certificates | None:
        try:
            return Certificates(self.tls_cert, self.tls_key, ca) if self.tls_cert else None
        except ValueError as error:
            raise ConfigError(f"{flag('tls_cert')}: {error}") from error

    def _check_tls(self) -> None:
        for name, needs in (
            ("tls_cert", "tls_key"),
            ("tls_key", "tls_cert"),
            ("tls_client_ca", "tls_cert"),
            ("tls_peer_ca", "tls_cert"),
            ("tls_peer_name", "tls_cert"),
        ):
            self._require(not getattr(self, name) or bool(getattr(self, needs)), name, f"needs {flag(needs)}")
        self._require(
            not self.tenants_file or bool(self.fleet_key_file),
            "tenants_file",
            f"needs {flag('fleet_key_file')}, from which the tenants' salts are derived",
        )
        for name in ("listen", "metrics_listen", "rows_listen"):
            self._require(
                not getattr(self, name)
                or is_local(getattr(self, name))
                or bool(self.tls_cert)
                or self.listen_unprotected == "yes",
                name,
                f"beyond this host needs {flag('tls_cert')}, or {flag('listen_unprotected')} yes on a network that "
                "only trusted callers can reach",
            )

    @property
    def accepted_formats(self) -> tuple[str, ...]:
        """The names in `formats`."""
        names = tuple(name for each in self.formats.split(",") if (name := each.strip().upper()))
        return (*FORMATS, *RARE_FORMATS) if names == ("ALL",) else names

    @property
    def index_for_people(self) -> str:
        """`index` for messages: without the password that its URL may contain."""
        return without_password(self.index)


def without_password(url: str) -> str:
    """Return `url` with `***` for its user and password, and for options that are passwords."""
    scheme, mark, rest = url.partition("://")
    place, question, options = rest.partition("?")
    if not mark:
        return "***" if {"@", "?"} & set(url) else url
    if (
        "@" in options and "@" not in place
    ):  # ambiguous: the password has a ?, or an option's password has an @
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
