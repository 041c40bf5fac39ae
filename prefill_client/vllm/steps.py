"""What the workers are told with each step, and what they may still be reading from."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from prefill_client.vllm.host_memory import Extent
from prefill_client.vllm.load_plan import Load, LoadedUpTo, LoadPlan

# vLLM asks about a waiting request nearly a thousand times a second. Where nothing else runs, its loop rests in here
# until rows arrive; a request that comes meanwhile waits no longer than this.
REST_S = 0.004
# Empty steps until nothing runs: with asynchronous scheduling one is planned while another is computed.
_EMPTY_STEPS = 3


class Loadable(Protocol):
    """An image whose rows are in host memory."""

    @property
    def identifier(self) -> str:
        """The name that vLLM knows it by."""

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where its rows are."""


Image = TypeVar("Image", bound=Loadable)


class Steps(Generic[Image]):
    """For the scheduler's thread."""

    def __init__(self, path: str, *, fetching: Callable[[], bool], wait: Callable[[float], None]) -> None:
        """`path` is the host memory's; `fetching` says whether rows are on their way, `wait` waits for some."""
        self._path = path
        self._fetching = fetching
        self._wait = wait
        self._step = 0
        self._empty_steps = 0  # in a row
        self._to_load: dict[str, Image] = {}  # for the next plan
        # Plans that workers may still be reading from.
        self._under_way: deque[tuple[int, list[Image]]] = deque()

    def __contains__(self, identifier: str) -> bool:
        """Whether the next plan has an image."""
        return identifier in self._to_load

    def load(self, image: Image) -> None:
        """Have the next plan load an image."""
        self._to_load[image.identifier] = image

    def plan(self, scheduled_tokens: int) -> LoadPlan:
        """Return what the workers are to load. With nothing scheduled some would not: then it waits for the next."""
        self._step += 1
        self._rest(scheduled_tokens)
        if not self._to_load or not scheduled_tokens:
            return LoadPlan(self._step, self._path)
        images = list(self._to_load.values())
        self._to_load.clear()
        self._under_way.append((self._step, images))
        loads = tuple(Load(each.identifier, each.extents) for each in images)
        return LoadPlan(self._step, self._path, loads)

    def loaded(self, up_to: LoadedUpTo) -> list[Image]:
        """Return what the workers have copied by now, once."""
        images: list[Image] = []
        while self._under_way and self._under_way[0][0] <= up_to.step:
            images += self._under_way.popleft()[1]
        return images

    def _rest(self, scheduled_tokens: int) -> None:
        self._empty_steps = 0 if scheduled_tokens else self._empty_steps + 1
        if self._empty_steps > _EMPTY_STEPS and self._fetching():
            self._wait(REST_S)
