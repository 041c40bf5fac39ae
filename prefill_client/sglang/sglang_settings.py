"""The settings of the plug-in: JSON in one environment variable, because SGLang has no flag for them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self, get_args

from prefill_client.plugin.service_settings import ServiceSettings

VARIABLE = "ENCODER_SERVICE_CONFIG"
PROCESSORS, MODELS = "prefill_client.sglang.processors", "prefill_client.sglang.models"
"""The packages that SGLang loads."""
Gating = Literal["request", "chunk"]


@dataclass(frozen=True, slots=True)
class SglangSettings(ServiceSettings):
    """The settings of all engines, and those of SGLang only."""

    location: ClassVar[str] = VARIABLE

    start_timeout_s: float = 60.0
    """How long SGLang waits for the service at start, while its weights load. Then it starts without the service."""
    timeout_s: float = 60.0
    """How long the images of a request may take to be encoded. Then SGLang's own tower encodes them."""
    fetch_timeout_s: float = 5.0
    """How long a prefill chunk, and with it the engine, may wait for its rows. Then SGLang's own tower encodes them."""

    image_folder: str = ""
    """Folder from which requests may name images by path, for SGLang's offline engine; empty: none is read."""

    gating: Gating = "request"
    """When a request reaches the scheduler. "request": once all its images are encoded. "chunk": once the service has
    accepted them; a prefill chunk, and with it the engine, then waits up to `timeout_s` for its images."""

    @property
    def rows_timeout_s(self) -> float:
        """Seconds that a prefill chunk may wait for its rows."""
        return self.timeout_s if self.gating == "chunk" else self.fetch_timeout_s

    def _check(self) -> None:
        if self.gating not in get_args(Gating):
            raise ValueError(
                f"{self.location}: gating must be one of {get_args(Gating)}, got {self.gating!r}"
            )
        if self.image_folder and not Path(self.image_folder).is_dir():
            raise ValueError(f"{self.location}: image_folder: {self.image_folder} is not a folder")
        ServiceSettings._check(self)

    @classmethod
    def from_environment(cls) -> Self:
        """Read the environment variable. Raises `ValueError` with the reason."""
        text = os.environ.get(VARIABLE, "")
        try:
            values = json.loads(text or "{}")
        except ValueError as error:
            raise ValueError(f"{VARIABLE} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(
                f'{VARIABLE} must be a JSON object, such as {{"endpoints": "unix:/tmp/encoder/socket"}}'
            )
        return cls.read(values)
