"""The configuration of the reference prefill service."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_contract.settings import knob
from prefill_client.http_settings import MAX_FILE_BYTES, HttpSettings


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(HttpSettings):
    """All settings, validated on construction. A bad value raises `ConfigError`."""

    environment_prefix = "PREFILLSVC_"

    model: Path = knob(help="folder of a Hugging Face checkpoint; its vision weights are not loaded")
    served_name: str = knob("", help="model name that requests use; empty: the name of the model's folder")
    device: str = knob("cpu", help="device of the language model: cpu, cuda or cuda:N")
    dtype: Literal["bfloat16", "float16", "float32"] = knob(
        "bfloat16", help="element type of the language model's weights"
    )
    threads: int = knob(0, zero=True, most=1024, help="CPU threads per torch operation; 0: torch's default")
    chunk_tokens: int = knob(
        512,
        most=1 << 20,  # the activations of a chunk are in memory at once
        help="largest number of tokens in one prefill chunk",
    )
    prefix_tokens: int = knob(
        65536,
        zero=True,
        most=1 << 24,  # a hundred kilobytes each, for a model of 8 billion parameters
        help="size of the prefix cache, tokens: KV caches of answered prompts, kept for follow-up requests; 0: off",
    )
    max_requests: int = knob(
        64,
        most=65_536,  # each is an open connection
        help="largest number of requests running at the same time; more are answered with 429",
    )
    max_video_bytes: int = knob(128 << 20, most=MAX_FILE_BYTES, help="largest video file, bytes")
    request_s: float = knob(
        300.0, help="seconds that a request may take to its first token, and again from there to its last"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_device = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        self._require(is_device, "device", "must be cpu, cuda or cuda:N")
