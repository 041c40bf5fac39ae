"""What a device's process reports: once, what it has loaded (`ModelFacts`); regularly, its `DeviceState`."""

from collections import Counter
from dataclasses import dataclass

import torch

from encoder_contract.geometry import GridRule
from encoder_contract.tower_spec import TowerSpec
from encoder_service.config import Config
from encoder_service.devices.model import MemoryPlan, Model, decode_threads
from encoder_service.devices.torch_device import MemoryUse
from encoder_service.families.model import CountedRows, VisionModel
from encoder_service.keys import Recipe
from encoder_service.vision import Tower
from encoder_service.vision.ulysses import MIN_PATCHES

TOWER_COUNTS = ("graph_batches", "eager_batches", "padding_patches")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model, as the server needs to know it.

    `spec` is None unless the tower is one of the server's own. `rule` is None if only the device's process can compute
    it. `decode_threads` images are decoded one by one at a time. `overtakes`: the tower may encode an image in the
    middle of a batch. An image of `group_patches` or more may be encoded together with all other devices; 0: none.
    """

    model_type: str
    spec: TowerSpec | None
    hidden: int
    levels: int
    width: int
    dtype: torch.dtype
    recipe: Recipe
    videos: str
    no_videos: str
    attention: str
    ahead_patches: int
    batch_patches: int
    rule: GridRule | None
    max_tokens: int
    device: str
    decoder: str
    jpegs: bool
    plan: MemoryPlan
    decode_threads: int
    overtakes: bool
    group_patches: int

    @classmethod
    def of(cls, model: Model, config: Config, devices: int) -> "ModelFacts":
        """Return the facts of a model in this process, one of `devices`."""
        tower = model.tower
        return cls(
            model_type=tower.model_type,
            spec=tower.spec if isinstance(tower, Tower) else None,
            hidden=tower.hidden,
            levels=tower.levels,
            width=tower.width,
            dtype=tower.dtype,
            recipe=model.recipe,
            videos=model.videos,
            no_videos=model.no_videos,
            attention=tower.attention,
            ahead_patches=tower.ahead_patches,
            batch_patches=tower.batch_patches,
            rule=None if isinstance(tower.geometry, CountedRows) else tower.geometry,
            max_tokens=tower.geometry.max_tokens,
            device=model.device.name,
            decoder=model.decoder.name,
            jpegs=model.decoder.decodes_batches,
            plan=MemoryPlan.of(model, model.device.memory(), config, devices),
            decode_threads=decode_threads(config, model.device),
            overtakes=model.device.kind == "cpu",
            group_patches=MIN_PATCHES[model.device.kind] if _is_group(tower, devices) else 0,
        )


def _is_group(tower: VisionModel, devices: int) -> bool:
    return devices > 1 and isinstance(tower, Tower) and tower.can_encode_in_group(devices)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Memory and counters of a device's process.

    The counters are those of `VisionModel` and the decoder's `messages`, by those names, and decoder deaths by reason.
    """

    memory: MemoryUse
    counts: Counter[str]

    @classmethod
    def of(cls, model: Model) -> "DeviceState":
        """Return the state of a model in this process."""
        counts = Counter({name: getattr(model.tower, name) for name in TOWER_COUNTS})
        return cls(
            model.device.memory(),
            counts + Counter({**model.decoder.deaths, "messages": model.decoder.messages}),
        )
