"""vLLM's encoder cache with one more rule: an image that is not here yet cannot be allocated.

The scheduler then prefills exactly up to that image, in this step and the next, and goes on when it has arrived;
what `--ec-manager-config` names.
"""

from typing import TYPE_CHECKING, Any, Self

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from prefill_client.vllm.gate import Gate
from prefill_client.vllm.image_name import is_ours
from prefill_client.vllm.scheduler_side import gates

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class EncoderServiceCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """Made by the scheduler, after the connector."""

    _gate: Gate

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig", **_: object) -> Self:
        """Return a manager that asks the connector's gate. Raises `ValueError` without our connector."""
        config = vllm_config.ec_transfer_config
        gate = gates.get(config.engine_id) if config is not None else None
        if gate is None:
            raise ValueError(
                "EncoderServiceCacheManager needs EncoderServiceConnector in --ec-transfer-config"
            )
        manager = cls(cache_size=cache_size)
        manager._gate = gate
        gate.exact = True
        return manager

    def can_allocate(self, request: "Request", input_id: int, *arguments: Any, **named: Any) -> bool:
        """Whether the image is here, or the engine's own to encode, and there is room for it."""
        identifier = request.mm_features[input_id].identifier
        if is_ours(identifier) and not self._gate.is_here(identifier):
            return False
        return bool(super().can_allocate(request, input_id, *arguments, **named))
