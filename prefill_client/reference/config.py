"""The configuration of the reference prefill service."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_contract.settings import Settings, knob


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(Settings):
    """Everything that can be set. Validated on construction: a bad value is a `ConfigError` at start."""

    environment_prefix = "PREFILLSVC_"

    model: Path = knob(help="folder of a Hugging Face checkpoint; its vision weights are not read")
    encoder: str = knob(
        "127.0.0.1:50051",
        help="host:port or unix:/path of the encoder; dns:host:port for all replicas of that name",
    )
    listen: str = knob("127.0.0.1:8000", help="host:port to serve HTTP on; port 0 takes a free one")
    served_name: str = knob("", help="name of the model in requests; empty takes the folder's")
    device: str = knob("cpu", help="where the language model runs: cpu, cuda or cuda:N")
    dtype: Literal["bfloat16", "float16", "float32"] = knob("bfloat16", help="element type of its weights")
    threads: int = knob(0, help="threads of a matrix product on the CPU; 0 leaves torch's choice")
    chunk_tokens: int = knob(512, help="tokens in a prefill chunk")
    prefix_tokens: int = knob(65536, help="tokens of answered prompts whose KV cache is kept for a follow-up")
    max_requests: int = knob(64, help="requests at once; over it 429")
    max_body_bytes: int = knob(256 << 20, help="largest request body")
    max_image_bytes: int = knob(32 << 20, help="largest image in a request")
    request_s: float = knob(
        300.0, help="seconds that a request may take to its first token, and then to its last"
    )
    image_hosts: str = knob(
        "", help="hosts, comma-separated, that image URLs may name; empty: data URLs only"
    )
    trace_folder: str = knob(
        "", help="folder in which the newest requests each leave a trace of what took how long; empty: none"
    )
    image_s: float = knob(10.0, help="seconds that loading an image from such a host may take")

    def __post_init__(self) -> None:
        self._require_positive(
            "chunk_tokens", "max_requests", "max_body_bytes", "max_image_bytes", "request_s", "image_s"
        )
        self._require_not_negative("threads", "prefix_tokens")
        self._require_endpoint("listen", tcp=True)
        is_device = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        self._require(is_device, "device", "must be cpu, cuda or cuda:N")
        if not self.encoder.startswith("dns:"):
            self._require_endpoint("encoder")
