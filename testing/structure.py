"""Weighs the code: size by folder and feature, ways to wait, threads, and the files and calls of one image.

    python -m testing.structure            # prints tables, and the path of an image
    python -m testing.structure --json

A change that adds a feature shows its row of the second table, and what it replaces. The path is traced on a real
server that encodes one image. Its device runs on a thread instead of in a process.
"""

import argparse
import ast
import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICE = ROOT / "encoder_service"
COUNTED = (
    "encoder_service",
    "prefill_client",
    "prefill_reference",
    "proto/encoder_contract",
    "testing",
    "bench",
    "demo",
    "tests",
)
PRODUCT = ("encoder_service/", "prefill_client/", "prefill_reference/", "proto/encoder_contract/")
# What a feature's files match, of the product and its tests, benchmarks and pages. Branches in other files don't count.
FEATURES = {
    "vLLM plug-in": "vllm",
    "SGLang packages": r"sglang(?!_gateway)(?!.*gateway)",
    "SGLang gateway": "sglang.*gateway",
    "plug-ins' common part, images by URL": "/plugin/|/media/|image.url|image_host|door",
    "Redis index and other replicas": "cluster|redis|peer|fleet|lease|replica",
    "decoder processes": "decoder_(pool|child|process)|shared_buffer|isolated|sandbox",
    "videos": "video|ffmpeg|clips",
    "rows to another host": "rows_port|rows_connection|tcp|two_hosts",
    "disk tier": "disk",
    "spans": "span|trace|otel|collector\\.py",
    "several GPUs for one image": "ulysses|group",
    "simulations and policies": "simulation|eviction|placement",
}
WAITS = ("Semaphore", "BoundedSemaphore", "Condition", "Barrier", "Lock", "RLock")
# It runs on a timer, so that a trace of an image has it only sometimes.
ON_A_TIMER = "http.py"


def entries() -> list[str]:
    """Return the modules and folders of the service."""
    names = {path.relative_to(SERVICE).parts[0].removesuffix(".py") for path in modules(SERVICE)}
    return sorted(names - {"__init__"})


def modules(folder: Path) -> list[Path]:
    """Return the Python files below a folder that were written by hand."""
    found = (path for path in folder.rglob("*.py") if "_pb2" not in path.name)
    return sorted(path for path in found if "__pycache__" not in path.parts)


def sizes() -> dict[str, tuple[int, int]]:
    """Return the number of files and lines of each folder."""
    return {
        name: (len(paths), sum(len(path.read_text().splitlines()) for path in paths))
        for name in COUNTED
        if (paths := modules(ROOT / name))
    }


def names_defined_twice() -> dict[str, list[str]]:
    """Return the class names that several files define, outside the tests, and those files."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for folder in COUNTED:
        for path in modules(ROOT / folder) if folder != "tests" else []:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(ROOT)))
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def by_feature() -> dict[str, dict[str, int]]:
    """Return the lines of product, tests and other code of each feature, and the words of its pages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {name: Counter[str]() for name in FEATURES}
    for name in listed.splitlines():
        if not (name.endswith((".py", ".md", ".lua")) and "_pb2" not in name):
            continue
        text = (ROOT / name).read_text()
        kind = (
            "product" if name.startswith(PRODUCT) else "tests" if name.startswith("tests/") else "other code"
        )
        for feature, pattern in FEATURES.items():
            if re.search(pattern, name, re.IGNORECASE):
                found[feature]["words" if name.endswith(".md") else kind] += (
                    len(text.split()) if name.endswith(".md") else len(text.splitlines())
                )
    return {feature: dict(counts) for feature, counts in found.items()}


def calls_of(*names: str) -> Iterator[tuple[Path, str, ast.Call]]:
    """Yield the calls of these names in the product, with their files."""
    for path in (path for folder in PRODUCT for path in modules(ROOT / folder)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (called := ast.unparse(node.func).rpartition(".")[2]) in names:
                yield path, called, node


def waits() -> Counter[str]:
    """Return how often the product makes each primitive of `WAITS`."""
    return Counter(called for _, called, _ in calls_of(*WAITS))


def threads() -> dict[str, list[str]]:
    """Return the names of threads by package. One module may give names to several: it then counts once."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, called, node in calls_of("Thread", "ThreadPoolExecutor"):
        names = [each.value for each in node.keywords if each.arg in ("name", "thread_name_prefix")]
        names += [each for each in node.args[1:2] if called == "ThreadPoolExecutor"]
        name = names[0].value if names and isinstance(names[0], ast.Constant) else f"those of {path.name}"
        package = next(folder for folder in PRODUCT if path.is_relative_to(ROOT / folder))
        found[Path(package).name].add(str(name))
    return {package: sorted(names) for package, names in found.items()}


class FileTrace:
    """Records which files of the service run, on any thread, and counts the calls."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call. Returns nothing, so lines are not traced."""
        name = frame.f_code.co_filename
        if event == "call" and str(SERVICE) in name and not name.endswith("__init__.py"):
            self.files[str(Path(name).relative_to(SERVICE))] += 1


async def trace_image(folder: Path) -> dict[str, int]:
    """Return the files of the service that one new image passes from Submit to its rows, and its calls in each."""
    from encoder_service.app import Server
    from encoder_service.config import Config
    from encoder_service.devices.model import load_model
    from prefill_client import EncoderClient, RowRequest
    from testing.checkpoints import write_checkpoint
    from testing.device_thread import DeviceThread
    from testing.photos import photo

    config = Config(model=write_checkpoint(folder), listen="127.0.0.1:0", devices="cpu", store_host_gib=0.25)
    trace = FileTrace()
    model = load_model(config)
    threading.settrace(trace)  # before the stages start: it applies to new threads
    server = Server(config, [DeviceThread(config, model)], model.decoder.files)
    await server.start()
    try:
        async with await EncoderClient.connect(server.endpoint) as client:
            await _encode(client, RowRequest, photo(256, 256, 0))
            trace.files.clear()
            sys.settrace(trace)
            await _encode(client, RowRequest, photo(256, 256, 1))
            passed = {name: trace.files[name] for name in sorted(trace.files) if name != ON_A_TIMER}
    finally:
        sys.settrace(None)
        threading.settrace(None)
        await server.drain()
    return passed


async def _encode(client: Any, request: Any, file: bytes) -> None:
    [submitted] = await client.submit([file])
    async with client.fetch([request(submitted.digest)], transports=["inline"]) as stream:
        async for outcome in stream:
            assert outcome.error is None, outcome.error


def main() -> None:
    """Print the table and the path, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    with TemporaryDirectory() as folder:
        passed = asyncio.run(trace_image(Path(folder)))
    if as_json:
        weighed = {"sizes": sizes(), "features": by_feature(), "waits": waits(), "threads": threads()}
        print(json.dumps({**weighed, "names_defined_twice": names_defined_twice(), "path": passed}))
        return
    print("| folder | files | lines |\n|---|---|---|")
    for name, (files, lines) in sizes().items():
        print(f"| `{name}/` | {files} | {lines:,} |")
    columns = ("product", "tests", "other code", "words")
    print(f"\n| feature | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for name, counts in by_feature().items():
        print(f"| {name} | {' | '.join(f'{counts.get(each, 0):,}' for each in columns)} |")
    print("\nWaiting: " + ", ".join(f"{count} × {name}" for name, count in waits().most_common()))
    for package, names in threads().items():
        print(f"{package} has {len(names)} kinds of threads: {', '.join(names)}")
    twice = names_defined_twice()
    print(f"\n{len(twice)} class names are defined twice.")
    for name, found in twice.items():
        print(f"  {name}: {', '.join(found)}")
    print(f"\nOne image on one node passes {len(passed)} files, with {sum(passed.values())} calls:")
    print("\n".join(f"  {calls:4} {name}" for name, calls in passed.items()))


if __name__ == "__main__":
    main()
