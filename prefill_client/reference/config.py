"""The configuration of the reference prefill service: a field is the flag, the environment name and the help line."""

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

# Not the name of the Kubernetes Service: Kubernetes itself injects <SERVICE>_PORT and the like.
ENVIRONMENT_PREFIX = "PREFILLSVC_"


def knob(default: Any = MISSING, *, help: str) -> Any:  # noqa: A002 - it is the help line
    """Declare a field with its help line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Everything that can be set. Checked on construction: a bad value is a `ValueError` at start."""

    model: Path = knob(help="folder of a Hugging Face checkpoint; its vision weights are not read")
    encoder: str = knob("127.0.0.1:50051", help="host:port or unix:/path of the encoder service")
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
        for name in (
            "chunk_tokens",
            "max_requests",
            "max_body_bytes",
            "max_image_bytes",
            "request_s",
            "image_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{flag(name)} must be positive, got {getattr(self, name)}")
        for name in ("threads", "prefix_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag(name)} must not be negative, got {getattr(self, name)}")
        if not self.listen.rpartition(":")[2].isdecimal():
            raise ValueError(f"--listen must be host:port, got {self.listen}")


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag per field, none of them with a default: absence must be seen."""
    for each in fields(ServiceConfig):
        choices = get_args(each.type) or None
        default = "required" if each.default is MISSING else f"default {each.default!r}"
        parser.add_argument(
            flag(each.name),
            type=str if choices else each.type,
            choices=choices,
            default=argparse.SUPPRESS,
            metavar=None if choices else each.name.rpartition("_")[2].upper(),
            help=f"{each.metadata['help']} ({default}; {ENVIRONMENT_PREFIX}{each.name.upper()})".replace(
                "%", "%%"
            ),
        )


def read_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServiceConfig:
    """Combine flags (they win) and environment. Raises `ValueError` naming what is unknown, bad or missing."""
    known = {ENVIRONMENT_PREFIX + each.name.upper(): each for each in fields(ServiceConfig)}
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name not in known:
            raise ValueError(f"{name} is not a setting; known are {', '.join(sorted(known))}")
        values[known[name].name] = _parsed(name, text, known[name].type)
    values.update(given)
    if "model" not in values:
        raise ValueError("--model (or PREFILLSVC_MODEL) is required")
    return ServiceConfig(**values)


def _parsed(name: str, text: str, kind: Any) -> Any:
    if choices := get_args(kind):
        if text not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {text!r}")
        return text
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{name} must be {kind.__name__}, got {text!r}") from error
