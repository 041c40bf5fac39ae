"""The configuration of the reference prefill service."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_contract.credentials import Credentials
from encoder_contract.settings import Settings, flag, knob
from prefill_client.media.destinations import Destinations


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(Settings):
    """All settings. Validated on construction: a bad value is a `ConfigError` at start."""

    environment_prefix = "PREFILLSVC_"

    model: Path = knob(help="folder of a Hugging Face checkpoint; its vision weights are not read")
    encoder: str = knob(
        "127.0.0.1:50051",
        help="host:port or unix:/path of the encoder; dns:host:port for all replicas of that name",
    )
    encoder_tls_ca: str = knob(
        "", help="PEM file of authorities of the encoder's certificate, or public; empty: no TLS"
    )
    encoder_tls_cert: str = knob(
        "", help="PEM file with a certificate of ours, where the encoder asks for one"
    )
    encoder_tls_key: str = knob("", help="PEM file with its key, not encrypted")
    encoder_tls_name: str = knob("", help="name in the encoder's certificate; empty: the host in --encoder")
    encoder_token_file: str = knob("", help="file with the token of our tenant at the encoder; empty: none")
    tls_cert: str = knob("", help="PEM file with this service's certificate, for HTTPS; empty: HTTP")
    tls_key: str = knob("", help="PEM file with its key, not encrypted")
    listen: str = knob("127.0.0.1:8000", help="host:port to serve HTTP on; port 0 takes a free one")
    served_name: str = knob("", help="name of the model in requests; empty takes the folder's")
    device: str = knob("cpu", help="where the language model runs: cpu, cuda or cuda:N")
    dtype: Literal["bfloat16", "float16", "float32"] = knob("bfloat16", help="element type of its weights")
    threads: int = knob(0, zero=True, help="threads of a matrix product on the CPU; 0 leaves torch's choice")
    chunk_tokens: int = knob(512, help="tokens in a prefill chunk")
    prefix_tokens: int = knob(
        65536, zero=True, help="tokens of answered prompts whose KV cache is kept for a follow-up"
    )
    max_requests: int = knob(64, help="requests at once; over it 429")
    max_body_bytes: int = knob(256 << 20, help="largest request body")
    max_image_bytes: int = knob(32 << 20, help="largest image in a request")
    request_s: float = knob(
        300.0, help="seconds that a request may take to its first token, and then to its last"
    )
    image_hosts: str = knob(
        "",
        help="where image URLs may point, comma-separated: hosts, addresses, networks, or `public` for every public "
        "host; empty: data URLs only",
    )
    trace_folder: str = knob(
        "", help="folder in which the newest requests each leave a trace of what took how long; empty: none"
    )
    image_s: float = knob(10.0, help="seconds that loading an image from such a host may take")
    image_cache_gib: float = knob(0.25, zero=True, help="memory for images that were loaded by URL, GiB")
    image_fresh_s: float = knob(
        60.0, zero=True, help="seconds such an image is kept if its host does not say how long"
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
    def credentials(self) -> Credentials:
        """What calls to the encoder are authenticated with."""
        return Credentials(
            self.encoder_tls_ca,
            self.encoder_tls_cert,
            self.encoder_tls_key,
            self.encoder_tls_name,
            self.encoder_token_file,
        )

    @property
    def image_destinations(self) -> Destinations:
        """What `image_hosts` allows."""
        return Destinations([rule for rule in self.image_hosts.split(",") if rule.strip()])
