"""Settings of middleware and connector: the `ec_connector_extra_config` in vLLM's `--ec-transfer-config`."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from prefill_client.plugin.service_settings import ServiceSettings

Gating = Literal["window", "request"]
WithoutService = Literal["refuse", "own_tower"]


@dataclass(frozen=True, slots=True)
class VllmSettings(ServiceSettings):
    """The keys of all engines, and those of vLLM alone."""

    location: ClassVar[str] = "ec_connector_extra_config"
    may_be_zero: ClassVar[tuple[str, ...]] = ("device_gib",)

    timeout_s: float = 60.0
    """How long the rows of one image may take. After that, its request ends with an error. If a replica dies, a running
    request waits half of this for another one, or `submit_timeout_s` with `own_tower`."""
    grace_s: float = 1.0
    """How long an image may be unknown to the service before it counts as lost. The middleware submits an image before
    the engine sees it, but another replica may learn of it later."""
    host_gib: float = 2.0
    """Limit of host memory for arriving rows. When it is full, new requests wait.

    It is allocated as it is used, but all at once if the engine runs on a GPU: workers register it with CUDA.
    """
    device_gib: float = 0.5
    """Limit of a worker's GPU memory for rows that it copies from the GPU of a service on this host, besides vLLM's own
    share of the GPU. Rows that do not fit come through host memory. 0, or no `shared_memory`: all rows do.
    """
    gating: Gating = "window"
    """Which images a request waits for: those of its next prefill step, or all of them."""
    name_key_file: str = ""
    """File with the key of image names; the API server and all its engines need the same. Empty: the variable
    `ENCODER_SERVICE_NAME_KEY`, else a file of this user on this host, which is created."""
    scores_only: bool = False
    """On a render server: name images without submitting them, for a router that renders requests only to score them.
    """
    without_service: WithoutService = "refuse"
    """While the service is down: answer 503, or let the engine's own tower encode, if it is loaded. The engine then
    also starts without the service, but not beside one with another model."""

    @property
    def has_own_tower(self) -> bool:
        """Whether the engine's own tower encodes images while the service cannot."""
        return self.without_service == "own_tower"

    def _check(self) -> None:
        for name, choices in (("gating", get_args(Gating)), ("without_service", get_args(WithoutService))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{self.location}: {name} must be one of {choices}")
        if not isinstance(self.scores_only, bool):
            raise ValueError(f"{self.location}: scores_only must be true or false")
        ServiceSettings._check(self)
