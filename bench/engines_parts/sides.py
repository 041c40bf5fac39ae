"""The sides of the benchmark of engines: engines, and what encodes images for them, as processes on cores."""

import json
import os
import time
import urllib.request
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.engines_parts.generators import MODEL_NAME, NEW_TOKENS, OfferedLoad, chats
from encoder_service.metrics import ScrapeError, scrape
from testing.engine_environments import SGLANG_PYTHON, VLLM_PYTHON, VLLM_VARIABLES
from testing.engine_flags import (
    CONNECTOR,
    MANAGER,
    SGLANG_FLAGS,
    SGLANG_VARIABLES,
    package_variables,
    transfer,
)
from testing.processes import EngineProcess, LoggedProcess, free_port
from testing.server_process import ServerProcess

SIDES = {
    "own": "the engine with its own tower",
    "encoder": "its own encoder disaggregation",
    "ours": "with the service",
}
STEP_TOKENS, SEQUENCES = 2048, 64
WARM_SEED = 900_000
STEPS = "vllm:iteration_tokens_total_count"  # vLLM's histogram of tokens has one observation a step
# OpenMP's threads sleep at once when they have no work. By default they spin, and take the cores of other processes.
ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
TIMEOUT_S = 300.0
WAITING_S = 3.0
SPIN_S = 1.5  # vLLM's workers spin for a second after a step


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of engines and of what encodes for them. If they are the same, Linux shares them among all."""

    engines: frozenset[int]
    encoder: frozenset[int]
    nice: int = 0
    """The niceness of the engines: with 10, what encodes comes first on cores that both use."""

    @property
    def every(self) -> frozenset[int]:
        """All cores of the side."""
        return self.engines | self.encoder


class Side:
    """Processes that answer chats at `url`."""

    def __init__(self, name: str, cores: Cores) -> None:
        self.name = name
        self.cores = cores
        self.url = ""
        self.processes: dict[str, LoggedProcess] = {}
        self.engines: list[EngineProcess] = []
        self.has_metrics = False
        """Whether the engines serve metrics."""
        self.distinct = 0
        """The number of distinct images that were sent."""
        self._cpu_before: dict[str, float] = {}
        self._encodes_before = 0
        self._steps_before = 0

    def warm_up(self) -> None:
        """Send one chat to each engine, and wait for the answers; begin to count."""
        for engine, content in zip(
            self.engines, chats(OfferedLoad(len(self.engines)), WARM_SEED), strict=True
        ):
            ask(self.url if self.name == "encoder" else engine.url, content)
        self.cpu_s()
        self.steps()
        self._encodes_before = self._encodes()

    def encodes_per_image(self) -> float | None:
        """Return the encodes for each distinct image that was sent; None if the side does not count them."""
        if "service" not in self.processes or not self.distinct:
            return None
        return round((self._encodes() - self._encodes_before) / self.distinct, 3)

    def _encodes(self) -> int:
        service = self.processes.get("service")
        return service.encodes() if isinstance(service, ServerProcess) else 0

    def waiting_core_percent(self) -> float | None:
        """Return the share of a core that an engine takes while its only request waits for an image.

        None without the service, or with several engines. It is over all processes of the engine.
        """
        service = self.processes.get("service")
        if not isinstance(service, ServerProcess) or len(self.engines) > 1:
            return None
        children = psutil.Process(service.process.pid).children(recursive=True)
        (device,) = (each for each in children if each.name() == "device")
        (content,) = chats(OfferedLoad(1), WARM_SEED + 1)
        with ThreadPoolExecutor(1) as threads:
            device.suspend()
            try:
                asking = threads.submit(ask, self.url, content)
                while not service.metrics().total("queue_images", **{"class": "demanded"}):
                    if asking.done():
                        asking.result()
                        raise RuntimeError("the engine answered without its image")
                    time.sleep(0.05)
                time.sleep(SPIN_S)
                began, before = time.monotonic(), self._engine_cpu_s()
                time.sleep(WAITING_S)
                spent_s, lasted_s = self._engine_cpu_s() - before, time.monotonic() - began
            finally:
                device.resume()
            asking.result()
        return round(100 * spent_s / lasted_s, 1)

    def _engine_cpu_s(self) -> float:
        spent = self._of_each(_cpu_s, sum)
        return sum(seconds for name, seconds in spent.items() if name.startswith("engine"))

    def peak_mib(self) -> dict[str, int]:
        """Return the peak resident memory of each process in MiB, by part and name; of equals, the largest."""
        return {name: round(kib / 1024) for name, kib in self._of_each(_peak_kib, max).items()}

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of the processes since the last call, or since they started, in seconds."""
        now = self._of_each(_cpu_s, sum)
        spent = {name: round(value - self._cpu_before.get(name, 0.0), 2) for name, value in now.items()}
        self._cpu_before = now
        return spent

    def steps(self) -> int | None:
        """Return the steps of the engines since the last call; None for SGLang, which is started without metrics.

        With the same requests, fewer steps are larger batches. Raises `ScrapeError` if an engine's metrics cannot be
        read or have no steps.
        """
        if not self.has_metrics:
            return None
        now = sum(_steps(engine.url) for engine in self.engines)
        spent, self._steps_before = now - self._steps_before, now
        return spent

    def used_cores(self) -> set[int]:
        """Return the cores on which any thread of any process may run."""
        return {core for _, process in self._tree() for thread in _threads(process) for core in thread}

    def _of_each(self, value: Any, join: Any) -> dict[str, float]:
        found = defaultdict[str, list[float]](list)
        for part, process in self._tree():
            with _gone_is_nothing():
                found[f"{part} {process.name()}"].append(value(process))
        return {name: float(join(values)) for name, values in found.items()}

    def _tree(self) -> Iterator[tuple[str, psutil.Process]]:
        for part, started in self.processes.items():
            process = psutil.Process(started.process.pid)
            for each in (process, *process.children(recursive=True)):
                yield part.rstrip("0123456789"), each


def ask(url: str, content: Sequence[Mapping[str, object]], **options: object) -> bytes:
    """Send a chat and return the answer, as JSON. Raises `OSError` if it fails."""
    message = {"role": "user", "content": content}
    body = {"model": MODEL_NAME, "messages": [message], "max_tokens": NEW_TOKENS, **options}
    return post(f"{url}/v1/chat/completions", body)


def post(url: str, body: object) -> bytes:
    """Post JSON and return the answer. Raises `OSError` if it fails."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())


@contextmanager
def _gone_is_nothing() -> Iterator[None]:
    try:
        yield
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return


def _peak_kib(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _steps(url: str) -> int:
    found = scrape(url, TIMEOUT_S)
    if not found.series(STEPS):
        raise ScrapeError(f"{url}: no metric {STEPS}")
    return int(found.total(STEPS))


def _threads(process: psutil.Process) -> list[set[int]]:
    found = []
    with _gone_is_nothing():
        for thread in process.threads():
            with _gone_is_nothing():
                found.append(os.sched_getaffinity(thread.id))
    return found


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """Run what is started in the block on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def started(
    engine: str, names: Sequence[str], model: Path, cores: Cores, engines: int, folder: Path
) -> Iterator[list[Side]]:
    """Run sides of an engine at the same time for the length of a `with` block; each has answered a chat."""
    build = VllmSides(model, folder) if engine == "vllm" else SglangSides(model)
    with ExitStack() as held:
        sides = []
        for name in names:
            side = Side(name, cores)
            held.callback(stop, side)
            build.start(side, engines)
            sides.append(side)
        for side in sides:
            for process in side.processes.values():
                if isinstance(process, EngineProcess):
                    process.wait_until_it_answers()
            side.warm_up()
        yield sides


def stop(side: Side) -> None:
    """End all processes of a side."""
    for process in reversed(side.processes.values()):
        if isinstance(process, EngineProcess):
            process.stop()
        else:
            process.terminate()


class VllmSides:
    """Starts `vllm serve`, alone, with an instance of vLLM that only encodes, or with the service."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder

    def start(self, side: Side, engines: int) -> None:
        """Start the processes of a side, and do not wait for the engines."""
        side.has_metrics = True
        flags: Sequence[str] = ()
        if side.name == "ours":
            service = start_service(side, self._model)
            settings = {"endpoints": service.endpoint, "host_gib": 0.25}
            flags = (
                *("--middleware", "prefill_client.vllm.middleware.EncoderServiceMiddleware"),
                *("--ec-transfer-config", json.dumps({**CONNECTOR, "ec_connector_extra_config": settings})),
                *("--ec-manager-config", json.dumps(MANAGER)),
            )
        elif side.name == "encoder":
            rows = self._folder / "rows"
            flags = ("--ec-transfer-config", json.dumps(transfer(rows, "ec_consumer")))
            producer = ("--ec-transfer-config", json.dumps(transfer(rows, "ec_producer")))
            with pinned(side.cores.encoder):
                encoder = self._engine(side.cores.encoder, 0, *producer, "--no-enable-prefix-caching")
            side.processes["encoder"] = encoder
        with pinned(side.cores.engines):
            for number in range(engines):
                process = self._engine(side.cores.engines, side.cores.nice, *flags)
                side.processes[f"engine{number}"] = process
                side.engines.append(process)
        before_them(side, VLLM_PYTHON, encoder.url if side.name == "encoder" else "")

    def _engine(self, cores: Collection[int], nice: int, *flags: str) -> EngineProcess:
        port = free_port()
        command: list[str | Path] = [
            *niced(nice), VLLM_PYTHON.with_name("vllm"), "serve", self._model, "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "2048", "--max-num-seqs", str(SEQUENCES),
            "--max-num-batched-tokens", str(STEP_TOKENS), "--block-size", "32",
            "--limit-mm-per-prompt", '{"image": 1, "video": 0}', *flags,
        ]  # fmt: skip
        variables = {**VLLM_VARIABLES, **ASLEEP, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        variables["OMP_NUM_THREADS"] = str(len(cores))
        return EngineProcess(f"http://127.0.0.1:{port}", command, variables)


class SglangSides:
    """Starts SGLang, alone, with SGLang's encoder server, or with the service by the packages."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def start(self, side: Side, engines: int) -> None:
        """Start the processes of a side, and do not wait for the engines."""
        flags: Sequence[str] = ()
        variables: Mapping[str, str] = {}
        if side.name == "ours":
            variables = package_variables(start_service(side, self._model).endpoint)
        elif side.name == "encoder":
            back_end = ("--encoder-transfer-backend", "zmq_to_tokenizer")
            with pinned(side.cores.encoder):
                encoder = self._engine(
                    side.cores.encoder, 0, "--encoder-only", *back_end, "--enable-prefix-mm-cache"
                )
            side.processes["encoder"] = encoder
            flags = ("--language-only", "--encoder-urls", encoder.url, *back_end)
        with pinned(side.cores.engines):
            for number in range(engines):
                port = ("--encoder-bootstrap-port", str(free_port())) if side.name == "encoder" else ()
                process = self._engine(side.cores.engines, side.cores.nice, *flags, *port, **variables)
                side.processes[f"engine{number}"] = process
                side.engines.append(process)
        before_them(side, SGLANG_PYTHON, "")

    def _engine(self, cores: Collection[int], nice: int, *flags: str, **variables: str) -> EngineProcess:
        port = free_port()
        command: list[str | Path] = [
            *niced(nice), SGLANG_PYTHON, "-m", "sglang.launch_server", "--model-path", self._model, "--port", str(port),
            *SGLANG_FLAGS, "--chunked-prefill-size", str(STEP_TOKENS), "--sleep-on-idle",
            "--max-running-requests", str(SEQUENCES), *flags,
        ]  # fmt: skip
        threads = {"OMP_NUM_THREADS": str(len(cores))}
        return EngineProcess(
            f"http://127.0.0.1:{port}", command, {**SGLANG_VARIABLES, **ASLEEP, **threads, **variables}
        )


def niced(nice: int) -> list[str | Path]:
    """Return what precedes a command to run it with this niceness."""
    return ["nice", "-n", str(nice)] if nice else []


def start_service(side: Side, model: Path) -> ServerProcess:
    """Start the service of a side, and wait until it listens."""
    with pinned(side.cores.encoder):
        service = ServerProcess(
            model,
            own_group=True,
            threads=len(side.cores.encoder),
            devices="cpu",
            dtype="float32",
            store_host_gib=1.0,
            device_peak_tflops=0.1,
            max_queue_s=3600,  # the other sides refuse nothing either
        )
        side.processes["service"] = service
        service.wait_until_it_listens()
    return service


def before_them(side: Side, python: Path, encoder: str) -> None:
    """Set the URL of a side: that of its only engine, or of a proxy before several or before vLLM's encoder."""
    if len(side.engines) == 1 and not encoder:
        side.url = side.engines[0].url
        return
    port = free_port()
    command: list[str | Path] = [
        python, "-m", "bench.engines_parts.proxy", "--port", str(port),
        "--engines", *(engine.url for engine in side.engines),
        *(["--encoder", encoder] if encoder else []),
    ]  # fmt: skip
    with pinned(side.cores.every):
        side.processes["proxy"] = EngineProcess(f"http://127.0.0.1:{port}", command, {})
    side.url = f"http://127.0.0.1:{port}"
