"""Streams, events and memory of the simulated device, with vector clocks, and what it finds.

A clock maps a stream's number to the last of its launches that is known to be done. A launch sees what its stream has
waited for, and what the launching thread has waited for. Everything is computed at once, on the thread that launches
it: a race never makes a value wrong, it is found by the clocks.
"""

import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tests.waiting import PATIENCE_S

ROOT = str(Path(__file__).resolve().parents[2])
Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Add to `clock` what `other` knows."""
    for stream, launch in other.items():
        clock[stream] = max(launch, clock.get(stream, 0))


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, gpu: "SimulatedGpu", index: int) -> None:
        self.gpu, self.number, self.device_index = gpu, len(gpu.streams), index
        self.device = torch.device("cuda", index)
        self.cuda_stream = self.number
        self.clock: Clock = {}
        self.held: list[threading.Event] = []
        """Its work goes on when these are set."""
        self.name = f"stream {self.number} of {threading.current_thread().name}"
        gpu.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        """Make later launches wait for what the event has recorded."""
        join(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        """Make later launches wait for what the other stream has launched."""
        join(self.clock, other.clock)

    def synchronize(self) -> None:
        """Make the thread wait for this stream."""
        self.gpu.waits("Stream.synchronize", self.clock, self.held)


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu
        self.clock: Clock = {}
        self._held: list[threading.Event] = []

    def record(self, stream: Stream | None = None) -> None:
        """Record what the stream has launched; by default the current one."""
        recorded = stream or self._gpu.host.stream
        self.clock, self._held = dict(recorded.clock), list(recorded.held)

    def synchronize(self) -> None:
        """Make the thread wait for what was recorded."""
        self._gpu.waits("Event.synchronize", self.clock, self._held)

    def elapsed_time(self, _other: "Event") -> float:
        """Return a millisecond."""
        return 1.0


class Block:
    """The memory of a tensor on the device: which launches of each stream read and wrote it last."""

    def __init__(self, gpu: "SimulatedGpu", stream: Stream) -> None:
        self.gpu, self.stream = gpu, stream
        self.in_graph = gpu.host.capture is not None
        """Whether it is in the memory of a graph, which torch keeps."""
        self.reads: Clock = {}
        self.writes: Clock = {}
        self.recorded: set[int] = set()

    def __del__(self) -> None:
        """Find streams that may still use the memory: torch hands it to the next tensor of its own stream."""
        known = dict(self.stream.clock)
        join(known, self.gpu.host.clock)
        for uses in (self.reads, self.writes):
            for number, launch in uses.items():
                if number not in {self.stream.number, *self.recorded} and launch > known.get(number, 0):
                    user = self.gpu.streams[number].name
                    self.gpu.finds(f"freed: memory of {self.stream.name} while {user} may use it")


KeptBlock = Callable[[], Block | None]
"""A captured block: a graph keeps its own memory, and only the addresses of other memory."""


def kept_block(block: Block) -> KeptBlock:
    """Return how a graph keeps a block."""
    return (lambda: block) if block.in_graph else weakref.ref(block)


class HostThread(threading.local):
    """What CUDA and torch keep for each thread: the current device and stream, and here what it has waited for."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self.device = 0
        self.clock: Clock = {}
        self.stream = gpu.default_streams[0]
        self.capture: Graph | None = None

    @property
    def name(self) -> str:
        """The thread's name."""
        return threading.current_thread().name


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`: the captured launches, which a replay runs again over the same memory."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu
        self.stream: Stream | None = None
        self.launches: list[tuple[str, list[KeptBlock], list[KeptBlock], Callable[[], object]]] = []

    def replay(self) -> None:
        """Run the captured launches on the current stream."""
        self._gpu.count("graph")
        for name, reads, writes, again in self.launches:
            self._gpu.launch(name, self._found(name, reads), self._found(name, writes), again, counted=False)
            again()

    def _found(self, name: str, kept: Iterable["KeptBlock"]) -> list[Block]:
        """Return the memory that a captured launch uses, if it is still there."""
        blocks = [each() for each in kept]
        if None in blocks:
            self._gpu.finds(f"freed: a graph replays {name} over memory that was freed since its capture")
        return [each for each in blocks if each is not None]


class SimulatedGpu:
    """Devices of one process. Thread-safe. `findings` counts what is wrong, with the lines of ours that led there."""

    def __init__(self, devices: int) -> None:
        self.streams: list[Stream] = []
        self.findings: Counter[str] = Counter()
        self.launches: Counter[tuple[str, str]] = Counter()
        """Launches by thread and kernel; "graph" is a replay, whose kernels are not counted."""
        self.never_waits = {"vit"}
        """Names of threads that must not wait for the device."""
        self.waiting: set[str] = set()
        """Names of threads that wait for a held stream."""
        self._pinned: dict[int, Tensor] = {}
        self.registered: dict[int, int] = {}
        """Registered host memory: where each piece begins and ends."""
        self._lock = threading.RLock()
        self._arriving: dict[int, tuple[Clock, Tensor, Stream]] = {}
        self._leaving: dict[int, tuple[Clock, Tensor]] = {}
        self.default_streams = [Stream(self, index) for index in range(devices)]
        self.host = HostThread(self)

    def finds(self, what: str) -> None:
        """Add a finding."""
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ROOT)]
        places = [
            f"{frame.filename.removeprefix(ROOT + '/')}:{frame.lineno}"
            for frame in reversed(ours)
            if "/simulated_gpu/" not in frame.filename and "/site-packages/" not in frame.filename
        ]
        with self._lock:
            self.findings[f"{what}, at {' < '.join(places[:3])}"] += 1

    def count(self, kernel: str) -> None:
        """Count a launch of this thread."""
        with self._lock:
            self.launches[self.host.name, kernel] += 1

    def launched(self, thread: str, kernel: str = "") -> int:
        """Return how often a thread launched a kernel, or any."""
        return sum(
            count for (by, name), count in self.launches.items() if by == thread and kernel in ("", name)
        )

    def waits(self, how: str, clock: Clock, held: Iterable[threading.Event] = ()) -> None:
        """Make this thread wait; it must not do that during a capture, nor if it is one of `never_waits`."""
        self.refuse_in_capture(how)
        if self.host.name in self.never_waits:
            self.finds(f"waits: {self.host.name} waits for the device in {how}")
        for event in held:
            self.waiting.add(self.host.name)
            assert event.wait(PATIENCE_S), f"{how} never ends"
        self.waiting.discard(self.host.name)
        join(self.host.clock, clock)

    def refuse_in_capture(self, what: str) -> None:
        """Raise what CUDA raises if this thread is capturing a graph."""
        if self.host.capture is not None:
            self.finds(f"capture: {what}")
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def launch(
        self,
        name: str,
        reads: Iterable[Block],
        writes: Iterable[Block],
        again: Callable[[], object] = lambda: None,
        *,
        counted: bool = True,
    ) -> None:
        """Note a launch on the current stream, and find races. `again` computes it once more, for replays."""
        host, reads, writes = self.host, list(reads), list(writes)
        with self._lock:
            stream = host.stream
            if counted:
                self.count(name)
            join(stream.clock, host.clock)
            stream.clock[stream.number] = now = stream.clock.get(stream.number, 0) + 1
            for block in reads:
                self._check(name, stream, "reads", block, {"writes": block.writes})
                block.reads[stream.number] = now
            for block in writes:
                self._check(name, stream, "overwrites", block, {"writes": block.writes, "reads": block.reads})
                block.writes[stream.number] = now
        if host.capture is not None:
            if stream is not host.capture.stream:
                self.finds(f"capture: {name} is launched on another stream than the captured one")
            kept = [[kept_block(each) for each in blocks] for blocks in (reads, writes)]
            host.capture.launches.append((name, *kept, again))

    def _check(self, name: str, stream: Stream, does: str, block: Block, uses: dict[str, Clock]) -> None:
        if block.stream.device != stream.device:
            self.finds(f"devices: {name} on {stream.device} {does} memory of {block.stream.device}")
        for kind, clock in uses.items():
            for number, launch in clock.items():
                if number != stream.number and launch > stream.clock.get(number, 0):
                    other = self.streams[number].name
                    self.finds(f"race: {name} on {stream.name} {does} what {other} {kind}")

    # Host memory that the device writes

    def arrives(self, tensor: Tensor) -> None:
        """Note that the current stream copies to host memory, which is complete once somebody has waited for it."""
        with self._lock:
            self._arriving[_key(tensor)] = (dict(self.host.stream.clock), tensor, self.host.stream)

    def read_by_host(self, tensor: Tensor, name: str) -> None:
        """Find a thread that reads host memory before it has waited for the device's copy."""
        found = self._arriving.get(_key(tensor))
        if found is not None and not self._has_waited(found[0]):
            self.finds(f"early: {name} reads host memory that the device may still write")

    def reported_by_host(self, what: str) -> None:
        """Find a thread that reports its current stream's copies to host memory as complete before it has waited."""
        if any(
            at is self.host.stream and not self._has_waited(clock) for clock, _, at in self._arriving.values()
        ):
            self.finds(f"early: {what} before its copy to the host has ended")

    def leaves(self, tensor: Tensor) -> None:
        """Note that the current stream reads host memory, which must stay as it is until somebody has waited."""
        with self._lock:
            self._leaving[_key(tensor)] = (dict(self.host.stream.clock), tensor)

    def written_by_host(self, tensor: Tensor, name: str) -> None:
        """Find a thread that overwrites host memory before the device's copy from it is known to have ended."""
        found = self._leaving.get(_key(tensor))
        if found is not None and not self._has_waited(found[0]):
            self.finds(f"early: {name} overwrites host memory that the device may still read")

    def _has_waited(self, clock: Clock) -> bool:
        return all(self.host.clock.get(at, 0) >= launch for at, launch in clock.items())

    def pin(self, tensor: Tensor) -> None:
        """Note that host memory is pinned. It is kept, so that no other memory gets its address."""
        self._pinned[_key(tensor)] = tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether host memory is pinned, or registered."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        is_registered = any(at <= begin and end <= to for at, to in list(self.registered.items()))
        return is_registered or _key(tensor) in self._pinned

    def register(self, address: int, size_bytes: int, _flags: int = 0) -> int:
        """Note that host memory is registered; return CUDA's code."""
        self.registered[address] = address + size_bytes
        return 0

    def unregister(self, address: int) -> int:
        """Note that host memory is no longer registered; return CUDA's code."""
        del self.registered[address]
        return 0

    def copies_host(self, tensor: Tensor) -> None:
        """Find a copy that CUDA refuses, because its host memory is partly registered, or in two pieces."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        touched = [(at, to) for at, to in list(self.registered.items()) if at < end and begin < to]
        if touched and not any(at <= begin and end <= to for at, to in touched):
            self.finds("registered: a copy's host memory is not in one registered piece")

    # The current stream and device of a thread

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """Stand in for `torch.cuda.stream`."""
        if stream is None:
            yield
            return
        host = self.host
        previous, host.stream = host.stream, stream
        try:
            yield
        finally:
            host.stream = previous
            self.leaves_device(stream.device_index)

    def leaves_device(self, index: int) -> None:
        """Make this thread's own device current after work on another: that creates a context there."""
        if self.host.device != index:
            self.finds(
                f"context: {self.host.name} makes one on device {self.host.device}, beside device {index}"
            )


def _key(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; 0 for the CPU's packed weights, whose memory torch does not show."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
