"""The configuration of the reference prefill service."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_contract.settings import flag, knob
from prefill_client.encoder_settings import EncoderSettings
from prefill_client.media.destinations import Destinations


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(EncoderSettings):
    """All settings. Validated on construction: a bad value is a `ConfigError` at start."""

    environment_prefix = "PREFILLSVC_"

    model: Path = knob(help="folder of a Hugging Face checkpoint; its vision weights are not loaded")
    tls_cert: str = knob("", help="PEM file with this service's certificate chain, for HTTPS; empty: HTTP")
    tls_key: str = knob("", help="PEM file with the private key of --tls-cert, unencrypted")
    listen: str = knob("127.0.0.1:8000", help="host:port to serve HTTP on; port 0 picks a free port")
    served_name: str = knob("", help="model name that requests use; empty: the name of the folder")
    device: str = knob("cpu", help="device of the language model: cpu, cuda or cuda:N")
    dtype: Literal["bfloat16", "float16", "float32"] = knob(
        "bfloat16", help="element type of the language model's weights"
    )
    threads: int = knob(0, zero=True, help="CPU threads of one torch operation; 0: torch's default")
    chunk_tokens: int = knob(512, help="most tokens in one prefill chunk")
    prefix_tokens: int = knob(
        65536,
        zero=True,
        help="tokens of answered prompts whose KV cache is kept for follow-up requests; 0: none are kept",
    )
    max_requests: int = knob(64, help="most requests at the same time; further ones are answered with 429")
    max_body_bytes: int = knob(256 << 20, help="largest request body, bytes")
    max_image_bytes: int = knob(32 << 20, help="largest image file in a request, bytes")
    max_video_bytes: int = knob(128 << 20, help="largest video file in a request, bytes")
    request_s: float = knob(
        300.0, help="seconds a request may take to its first token, and again from there to its last"
    )
    image_hosts: str = knob(
        "",
        help="hosts that URLs of images and videos may name, comma-separated: host names, addresses, networks, or "
        "`public` for every public host; empty: only data URLs are accepted",
    )
    trace_folder: str = knob(
        "", help="folder for the timing traces of the newest requests, one file each; empty: no traces"
    )
    image_s: float = knob(10.0, help="seconds that the download of one image or video may take")
    image_cache_gib: float = knob(
        0.25,
        zero=True,
        help="size of the cache of downloaded images, and of another one of downloaded videos, GiB; 0: none are kept",
    )
    image_fresh_s: float = knob(
        60.0, zero=True, help="seconds a downloaded image or video is kept if its host sends no lifetime"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_endpoint("listen", tcp=True)
        try:
            self.image_destinations  # noqa: B018 - it may refuse
        except ValueError as error:
            self._require(False, "image_hosts", f"must be hosts, addresses and networks: {error}")
        is_device = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        self._require(is_device, "device", "must be cpu, cuda or cuda:N")
        if not self.encoder.startswith("dns:"):
            self._require_endpoint("encoder")
        self._require(
            bool(self.tls_cert) == bool(self.tls_key), "tls_cert", f"needs {flag('tls_key')} with it"
        )

    @property
    def image_destinations(self) -> Destinations:
        """What `image_hosts` allows."""
        return Destinations([rule for rule in self.image_hosts.split(",") if rule.strip()])
