"""What the scheduler's side and the workers say to each other with every step: places in memory, never rows."""

from dataclasses import dataclass

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from prefill_client.vllm.host_memory import Extent


@dataclass(frozen=True, slots=True)
class Load:
    """One image to load; pickles to a few hundred bytes."""

    identifier: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """One image whose rows, once the tower has made them, are copied out; `number` is what that is told by."""

    extents: tuple[Extent, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Where the rows of saved images go: host memory at `path`, and the pipe that is told of each."""

    path: str
    pipe: str


@dataclass
class LoadPlan(ECConnectorMetadata):  # type: ignore[misc]
    """What every worker loads before a step, from the host memory at `path`, and what one of them saves after it."""

    step: int
    path: str
    loads: tuple[Load, ...] = ()
    saves: dict[str, Save] | None = None
    outgoing: Outgoing | None = None


@dataclass
class LoadedUpTo(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker has loaded what the plans up to this step said."""

    step: int

    def aggregate(self, other: "LoadedUpTo") -> "LoadedUpTo":
        """The slowest worker counts."""
        return LoadedUpTo(min(self.step, other.step))
