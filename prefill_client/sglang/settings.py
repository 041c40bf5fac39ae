"""The settings, which SGLang has no flag for: JSON in one environment variable."""

import json
import os
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args

from prefill_client.engine.settings import ServiceSettings

VARIABLE = "ENCODER_SERVICE_CONFIG"
Gating = Literal["request", "chunk"]


@dataclass(frozen=True, slots=True)
class Settings(ServiceSettings):
    """The keys of all engines, and those of SGLang alone."""

    location: ClassVar[str] = VARIABLE

    start_timeout_s: float = 60.0
    """How long SGLang waits at its start for the service, while its weights load; then it starts without."""
    timeout_s: float = 60.0
    """How long the images of a request may take to be encoded; then SGLang's own tower encodes them."""
    fetch_timeout_s: float = 5.0
    """How long a prefill chunk, and with it the engine, may wait for its rows; then SGLang's own tower encodes."""

    gating: Gating = "request"
    """When a request reaches the scheduler: once all its images are encoded, or once the service has taken them. Then a
    prefill chunk, and with it the engine, waits for its images up to `timeout_s`."""

    @property
    def rows_timeout_s(self) -> float:
        """How long a prefill chunk may wait for its rows, in seconds."""
        return self.timeout_s if self.gating == "chunk" else self.fetch_timeout_s

    def _check(self) -> None:
        if self.gating not in get_args(Gating):
            raise ValueError(
                f"{self.location}: gating must be one of {get_args(Gating)}, got {self.gating!r}"
            )
        ServiceSettings._check(self)

    @classmethod
    def from_environment(cls) -> Self:
        """Read the variable; raises `ValueError` naming what is wrong."""
        text = os.environ.get(VARIABLE, "")
        try:
            given = json.loads(text or "{}")
        except ValueError as error:
            raise ValueError(f"{VARIABLE} is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(
                f'{VARIABLE} must be a JSON object, such as {{"endpoints": "unix:/tmp/encoder/socket"}}'
            )
        return cls.read(given)
