"""vLLM's encoder cache in an engine that shares rows: the gate sees what it holds, and asks the store for the rest."""

from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from prefill_client.vllm.sharing_gate import SharingGate

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The gate of each scheduler of this process by its engine id: where the cache manager finds it.
_gates: "WeakValueDictionary[str, SharingGate]" = WeakValueDictionary()


class SharingCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """Made by the scheduler, after the connector."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig", **_: object) -> Self:
        """Return a manager whose images the connector's gate knows."""
        manager = cls(cache_size=cache_size)
        _gates[vllm_config.ec_transfer_config.engine_id].encoder_cache = manager.cached
        return manager


_NAME = f"{SharingCacheManager.__module__}.{SharingCacheManager.__qualname__}"


def show_encoder_cache(gate: SharingGate, config: "VllmConfig") -> None:
    """Let `gate` see the encoder cache of the scheduler that is being made. Raises `ValueError` if that is another."""
    chosen = config.ec_manager_config
    if chosen.encoder_cache_manager_cls not in (None, _NAME):
        raise ValueError(
            f"--ec-manager-config names {chosen.encoder_cache_manager_cls}; ec_both brings its own cache manager: "
            "leave the flag out"
        )
    chosen.encoder_cache_manager_cls = _NAME
    _gates[config.ec_transfer_config.engine_id] = gate
