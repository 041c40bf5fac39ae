"""An encoder cache manager for vLLM: an image whose rows have not arrived cannot be allocated."""

from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from prefill_client.vllm.gate import PrefillGate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


gates: "WeakValueDictionary[str, PrefillGate]" = WeakValueDictionary()
"""The gate of each scheduler in this process, by engine id. vLLM passes the cache manager no connector."""


class EncoderServiceCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """An encoder cache with one more rule: an image whose rows have not arrived cannot be allocated.

    The scheduler then prefills exactly up to that image, in this step and the next, and continues when it arrives.
    `--ec-manager-config` names this class. The scheduler makes it after the connector.
    """

    _gate: PrefillGate

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig", **_: object) -> Self:
        """Return a manager that uses the connector's gate. Raises `ValueError` without our connector."""
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
        """Whether there is room for the image, and either its rows have arrived or the engine encodes it."""
        if self._gate.awaits(request.mm_features[input_id].identifier):
            return False
        return bool(super().can_allocate(request, input_id, *arguments, **named))
