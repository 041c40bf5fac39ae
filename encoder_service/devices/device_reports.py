"""What a device's process reports: once, what it has loaded (`ModelFacts`); regularly, its `DeviceState`."""

from collections import Counter
from dataclasses import dataclass

from encoder_contract.geometry import GridRule
from encoder_contract.tower_spec import TowerSpec
from encoder_service.devices.memory_plan import MemoryPlan, MemoryUse
from encoder_service.keys import Recipe


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model, as the server needs to know it.

    `spec` is None unless the tower is one of the server's own. `rule` is None if only the device's process can compute
    it. `torch` is the version that computes. `decode_threads` images are decoded one by one at a time. `overtakes`: the
    tower may encode an image in the middle of a batch. An image of `group_patches` or more may be encoded together with
    all other devices; 0: none.
    """

    model_type: str
    spec: TowerSpec | None
    hidden: int
    levels: int
    width: int
    row_bytes: int
    recipe: Recipe
    videos: str
    no_videos: str
    attention: str
    ahead_patches: int
    batch_patches: int
    rule: GridRule | None
    max_tokens: int
    device: str
    torch: str
    decoder: str
    jpegs: bool
    plan: MemoryPlan
    decode_threads: int
    overtakes: bool
    group_patches: int


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Memory and counters of a device's process.

    The counters are those of `VisionModel` and the decoder's `messages`, by those names, and decoder deaths by reason.
    """

    memory: MemoryUse
    counts: Counter[str]
