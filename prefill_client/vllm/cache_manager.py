"""vLLM's encoder cache, as the gate needs it: it waits for images that are not here, or shows which ones it has."""

from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from prefill_client.vllm.gate import Gate, NamedGate, SharingGate
from prefill_client.vllm.image_name import is_ours

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


gates: "WeakValueDictionary[str, Gate[Any]]" = WeakValueDictionary()
"""The gate of each scheduler of this process by its engine id: where the cache manager finds it."""


class EncoderServiceCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """An encoder cache with one more rule: an image that is not here yet cannot be allocated.

    The scheduler then prefills exactly up to that image, in this step and the next, and goes on when it has arrived.
    `--ec-manager-config` names this class; the scheduler makes it after the connector.
    """

    _gate: NamedGate

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig", **_: object) -> Self:
        """Return a manager that asks the connector's gate. Raises `ValueError` without our connector."""
        config = vllm_config.ec_transfer_config
        gate = gates.get(config.engine_id) if config is not None else None
        if not isinstance(gate, NamedGate):
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


class SharingCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """An encoder cache that shows its images to the gate of an engine that shares rows.

    The gate asks the store only for images that are not in it. The scheduler makes it after the connector.
    """

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig", **_: object) -> Self:
        """Return a manager whose images the connector's gate knows."""
        gate = gates[vllm_config.ec_transfer_config.engine_id]
        assert isinstance(gate, SharingGate), "only such an engine names this class"
        manager = cls(cache_size=cache_size)
        gate.encoder_cache = manager.cached
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
    gates[config.ec_transfer_config.engine_id] = gate
