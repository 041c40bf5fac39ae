"""The configuration of the server."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit

from encoder_contract.certificates import Certificates
from encoder_contract.endpoint import is_local
from encoder_contract.fleet_key import SIGNATURE_BYTES, FleetKey
from encoder_contract.header import FORMATS
from encoder_contract.settings import ConfigError, Settings, flag, knob

__all__ = ["GIB", "Config", "ConfigError", "flag"]

GIB = 1 << 30
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All settings. Validated on construction: an invalid value raises `ConfigError` at start."""

    environment_prefix = "ENCSVC_"
    removed: ClassVar = {
        "share_urls": "leave it out; each language server downloads image URLs itself and keeps them in its own cache",
    }

    model: Path = knob(
        help="folder of a Hugging Face checkpoint (config.json, preprocessor_config.json, *.safetensors)"
    )
    listen: str = knob("127.0.0.1:50051", help="host:port or unix:/path to serve on; port 0 picks a free one")
    listen_unprotected: Literal["no", "yes"] = knob(
        "no",
        help="listen beyond this host without TLS: for a network that only trusted callers reach and read",
    )
    tls_cert: str = knob(
        "", help="PEM file with this server's certificate and those up to its authority; empty: no TLS"
    )
    tls_key: str = knob("", help="PEM file with its key, not encrypted")
    tls_client_ca: str = knob(
        "", help="PEM file of authorities; with it, a gRPC caller needs a certificate of theirs (mutual TLS)"
    )
    tls_peer_ca: str = knob(
        "",
        help="PEM file of authorities of the other replicas; empty: --tls-client-ca's, else the public ones",
    )
    tls_peer_name: str = knob(
        "", help="name in the other replicas' certificates; empty: the host that each of them advertises"
    )
    fleet_key_file: str = knob(
        "",
        help="file with a secret of all replicas, 32 characters or more: rows and files that it did not sign are not "
        "believed; more lines are older secrets, still believed",
    )
    tenants_file: str = knob(
        "",
        help="TOML file of tenants with their tokens, certificates and rights: others are not served; empty: all are",
    )
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
    tower_precision: Literal["full", "fp8"] = knob(
        "full",
        help="precision of the tower's products: full is that of the element type, fp8 is quicker on a GPU and less "
        "exact; its rows have addresses of their own",
    )
    attention: Literal["auto", "flash3", "varlen", "flash2", "sdpa", "flash4", "cudnn"] = knob(
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
    decoder_process: Literal["auto", "yes", "no"] = knob(
        "auto",
        help="decode in processes of their own, without files and network: auto does on the CPU; with yes a GPU gets "
        "pixels that the CPU decoded",
    )
    decode_limit_s: float = knob(
        15.0,
        help="seconds of a processor that decoding an image may take in such a process; of the clock, three times as "
        "many and three more, but 5 if it uses no processor",
    )
    decode_threads: int = knob(
        0,
        zero=True,
        help="threads that decode and preprocess images one by one (DALI's own pool has the same number); 0: 8 with a "
        "GPU, 2 without",
    )
    decode_pixels: int = knob(
        50_000_000,
        help="source pixels decoded at a time, once in a batch and once one by one; one larger image is decoded "
        "beside them",
    )
    torch_threads: int = knob(0, zero=True, help="threads of a matrix product on the CPU; 0: torch's default")
    batch_patches: int = knob(
        0,
        zero=True,
        help="patches in one batch of the vision tower, a larger image runs alone; 0: 16384 on a GPU, 1024 on the CPU",
    )
    store_host_gib: float = knob(2.0, help="host tier of the embedding store, GiB of shared memory")
    store_device_gib: float = knob(
        0.0, zero=True, help="device tier of the embedding store, GiB of GPU memory; 0 turns it off"
    )
    store_prefault: Literal["yes", "no"] = knob(
        "yes",
        help="touch the store's memory at start, in the background, so that later copies cause no page faults",
    )
    store_segment_dir: Path = knob(Path("/dev/shm"), help="folder of the shared-memory segment")  # noqa: S108
    accept_put: Literal["no", "yes"] = knob(
        "no",
        help="let callers put rows that they computed themselves: whoever may put can put wrong ones (SECURITY.md)",
    )
    store_only: Literal["no", "yes"] = knob(
        "no",
        help="keep rows that callers put and peers hold, and encode nothing: needs no weights and no GPU",
    )
    model_fingerprint: str = knob(
        "",
        help="with --store-only: fingerprint of the model (64 hexadecimal digits, as an encoding replica prints it at "
        "start) whose replicas share an index with this one; empty: of the configuration alone",
    )
    put_lease_s: float = knob(
        30.0, help="seconds a caller of Put has to compute the rows of an image and send them"
    )
    source_gib: float = knob(
        0.5, zero=True, help="submitted image bytes kept to recompute evicted embeddings, GiB"
    )
    source_ttl_s: float = knob(600.0, help="seconds a submitted image is kept after its last use")
    formats: str = knob(
        ",".join(FORMATS), help="image formats accepted, comma-separated; others are INVALID_ARGUMENT"
    )
    max_image_bytes: int = knob(32 << 20, help="largest image file accepted")
    max_image_pixels: int = knob(100_000_000, help="largest width x height accepted, read from the header")
    max_images_per_call: int = knob(512, help="images in one Submit or Fetch call")
    max_calls: int = knob(
        1024,
        help="calls open at a time, and as many Submit calls, three quarters of them from one host; over it "
        "RESOURCE_EXHAUSTED",
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
    max_client_share: float = knob(0.75, below=1, help="share of the queue that a single client may fill")
    max_waiting_images: int = knob(
        4096,
        help="images that Fetches wait for and that are not submitted yet, three quarters of them for one client; "
        "over it RESOURCE_EXHAUSTED",
    )
    max_pinned_share: float = knob(
        0.9,
        below=1,
        help="share of the host store that running Fetches may keep pinned, three quarters of it for one client; "
        "over it RESOURCE_EXHAUSTED",
    )
    max_grace_ms: int = knob(
        30_000,
        zero=True,
        help="longest time a Fetch may wait for an image that is not submitted yet, milliseconds",
    )
    drain_s: float = knob(30.0, zero=True, help="seconds for which running calls may finish after SIGTERM")
    hand_over_s: float = knob(
        0.0,
        zero=True,
        help="seconds before draining in which other replicas fetch what only this one holds; 0: no handover",
    )
    device_peak_tflops: float = knob(
        0.0,
        zero=True,
        help="peak of the device in TFLOP/s at this element type, for the utilisation metric; 0: unknown",
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", help="lowest level that is logged")
    log_format: Literal["console", "json"] = knob("console", help="log format")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.accepted_formats and {*self.accepted_formats} <= {*FORMATS}
        self._require(bool(known), "formats", f"must be some of {', '.join(FORMATS)}")
        self._require_endpoint("listen")
        if self.advertise:
            self._require_endpoint("advertise")
        if self.metrics_listen:
            self._require_endpoint("metrics_listen", tcp=True)
        self._check_tls()
        same = self.listen == self.metrics_listen and not self.listen.endswith(":0")
        self._require(not same, "metrics_listen", f"must not be that of {flag('listen')}")
        is_fingerprint = re.fullmatch(r"|[0-9a-f]{64}", self.model_fingerprint) is not None
        self._require(is_fingerprint, "model_fingerprint", "must be 64 hexadecimal digits")
        if self.model_fingerprint and not self.stores_only:
            raise ConfigError(
                f"{flag('model_fingerprint')} is for {flag('store_only')}: weights have their own"
            )
        self._require(
            not (self.stores_only and self.store_device_gib),
            "store_device_gib",
            f"is not for {flag('store_only')}",
        )
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        self._require(is_device, "device", "must be auto, cpu, cuda or cuda:N")
        if self.index != "memory" and not _is_redis(self.index):
            raise ConfigError(
                f"{flag('index')} must be memory or redis://host:port and its like, got {self.index_for_people}"
            )

    def certificates(self) -> Certificates | None:
        """Read our certificate, and the authorities of callers; None without TLS. Raises `ConfigError`."""
        return self._read_certificates(self.tls_client_ca)

    def peer_certificates(self) -> Certificates | None:
        """Read our certificate, and the authorities of the other replicas'; None without TLS. Raises `ConfigError`."""
        return self._read_certificates(self.tls_peer_ca or self.tls_client_ca)

    @property
    def max_shared_bytes(self) -> int:
        """The largest image file as it is shared with other replicas: with its signature."""
        return self.max_image_bytes + SIGNATURE_BYTES

    def fleet_key(self) -> FleetKey | None:
        """Read the fleet's key; None without one. Raises `ConfigError`."""
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
            f"needs {flag('fleet_key_file')}, of which the salts of tenants are made",
        )
        for name in ("listen", "metrics_listen"):
            self._require(
                not getattr(self, name)
                or is_local(getattr(self, name))
                or bool(self.tls_cert)
                or self.listen_unprotected == "yes",
                name,
                f"beyond this host needs {flag('tls_cert')}, or {flag('listen_unprotected')} yes on a network that "
                "only trusted callers reach",
            )

    @property
    def stores_only(self) -> bool:
        """Whether the server has no tower."""
        return self.store_only == "yes"

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
