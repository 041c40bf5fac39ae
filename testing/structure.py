"""Measures the size of the code, the class names defined twice, and the files that one image passes.

    python -m testing.structure            # prints a table, the names, and the path of an image
    python -m testing.structure --json

The path is traced on a real server that encodes one image. Its device runs on a thread instead of in a process.
"""

import argparse
import ast
import asyncio
import json
import sys
import threading
from collections import defaultdict
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


class FileTrace:
    """Records which files of the service run, on any thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call. Returns nothing, so lines are not traced."""
        name = frame.f_code.co_filename
        if event == "call" and str(SERVICE) in name and not name.endswith("__init__.py"):
            self.files.add(str(Path(name).relative_to(SERVICE)))


async def trace_image(folder: Path) -> list[str]:
    """Return the files of the service that one new image passes from Submit to its rows."""
    from encoder_service.app import Server
    from encoder_service.config import Config
    from encoder_service.devices.model import load_model
    from prefill_client import EncoderClient, RowRequest
    from testing.checkpoints import write_checkpoint
    from testing.device_thread import DeviceThread
    from testing.photos import photo

    config = Config(
        model=write_checkpoint(folder),
        listen="127.0.0.1:0",
        devices="cpu",
        store_host_gib=0.25,
    )
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
            passed = sorted(trace.files - {ON_A_TIMER})
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
        print(json.dumps({"sizes": sizes(), "names_defined_twice": names_defined_twice(), "path": passed}))
        return
    print("| folder | files | lines |\n|---|---|---|")
    for name, (files, lines) in sizes().items():
        print(f"| `{name}/` | {files} | {lines:,} |")
    twice = names_defined_twice()
    print(f"\n{len(twice)} class names are defined twice.")
    for name, found in twice.items():
        print(f"  {name}: {', '.join(found)}")
    print(
        f"\nOne image on one node passes {len(passed)} files:\n" + "\n".join(f"  {name}" for name in passed)
    )


if __name__ == "__main__":
    main()
