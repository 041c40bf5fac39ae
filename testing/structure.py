"""The structure in numbers: how much there is to understand, measured from the code and from one image's path.

    python -m testing.structure            # prints the table
    python -m testing.structure --json

Everything is read from the source, but for the path of an image and of a withdrawal: those are traced on a real
server that encodes one image and has one caller leave.
"""

import argparse
import ast
import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICE = ROOT / "encoder_service"
# Runs on a timer, with or without an image: it would be counted now and then.
ON_A_TIMER = "observability/loop_lag.py"
# Figure -> what it counts, and the goal (the figure shall be at most this; `exports` at least).
GOALS = {
    "entries": ("entries in `encoder_service/`", 15),
    "layers": ("layers of its import graph", 8),
    "arrows": ("arrows of its import graph", 50),
    "encoder_lines": ("`encoder.py`: lines", 160),
    "encoder_methods": ("`encoder.py`: methods", 17),
    "encoder_collaborators": ("`encoder.py`: collaborators", 9),
    "image_files": ("server files that one image on one node passes", 25),
    "handed_functions": ("functions handed through the composition root", 6),
    "withdraw_files": ("files that a withdrawal crosses", 4),
    "exports": ("names that `prefill_client` exports", 1),
    "service_lines": ("lines of the service", 9200),
}


def entries() -> list[str]:
    """Return the modules and folders of the service."""
    names = {path.relative_to(SERVICE).parts[0].removesuffix(".py") for path in modules(SERVICE)}
    return sorted(names - {"__init__"})


def modules(folder: Path) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def entry_graph() -> dict[str, set[str]]:
    """Return which entries each entry of the service imports."""
    known = set(entries())
    graph: dict[str, set[str]] = {name: set() for name in known}
    for path in modules(SERVICE):
        name = path.relative_to(SERVICE).parts[0].removesuffix(".py")
        if name not in known:
            continue
        for imported in _imports(path):
            top, _, rest = imported.partition(".")
            entry = rest.split(".")[0]
            if top == "encoder_service" and entry in known and entry != name:
                graph[name].add(entry)
    return graph


def layers(graph: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of imports: how many layers there are."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(below) for below in graph[name]), default=0)
        return heights[name]

    return max(map(height, graph))


def encoder_counts() -> tuple[int, int, int]:
    """Return lines of encoder.py, and methods and constructor parameters of its class."""
    source = (SERVICE / "encoder.py").read_text()
    [encoder] = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Encoder"]
    methods = [n for n in encoder.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    [init] = [method for method in methods if method.name == "__init__"]
    return len(source.splitlines()), len(methods) - 1, len(init.args.args) - 1 + len(init.args.kwonlyargs)


def handed_functions() -> list[str]:
    """Return the functions that the composition root hands over as arguments."""
    root = next(path for name in ("app", "server") if (path := SERVICE / f"{name}.py").exists())
    defined = _function_names()
    found = []
    for call in ast.walk(ast.parse(root.read_text())):
        # To constructors only: what a call does with a function at once is no wiring.
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2][:1].isupper():
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if _is_function(argument, defined):
                    found += [ast.unparse(argument)]
    return found


def service_lines() -> int:
    """Return the lines of the service, tests and generated code apart."""
    return sum(len(path.read_text().splitlines()) for path in modules(SERVICE))


def exports() -> int:
    """Return how many names `import prefill_client` gives."""
    tree = ast.parse((ROOT / "prefill_client" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _function_names() -> set[str]:
    """Names of all functions and methods that are not also those of a property or a field."""
    names, values = set[str](), set[str]()
    for path in modules(SERVICE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign):
                values.add(ast.unparse(node.target))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_value = {ast.unparse(each) for each in node.decorator_list} & {
                    "property",
                    "cached_property",
                }
                (values if is_value else names).add(node.name)
    return names - values


def _is_function(argument: ast.expr, defined: set[str]) -> bool:
    if isinstance(argument, ast.Lambda):
        return True
    if isinstance(argument, ast.Call):
        return ast.unparse(argument.func) == "partial"
    if isinstance(argument, ast.Attribute):
        return argument.attr in defined and not argument.attr.startswith("SIG")
    return isinstance(argument, ast.Name) and argument.id in defined


# Traced


class Trace:
    """Which files of the service run, on any thread, and how many a withdrawal goes through."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.withdrawals: list[set[str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; the tracer of each line is not wanted."""
        if event != "call":
            return
        file = _service_file(frame)
        if not file or file == ON_A_TIMER:
            return
        self.files.add(file)
        # A claim that ends because its work is done goes the same way from `detach` on: that is no withdrawal.
        if frame.f_code.co_name in ("withdraw", "detach", "remove") and _is_below(frame, "withdraw"):
            self.withdrawals.append(_files_above(frame))

    def clear(self) -> None:
        """Begin anew."""
        self.files.clear()
        self.withdrawals.clear()


def _service_file(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    inside = str(SERVICE) in name and not name.endswith("__init__.py")
    return str(Path(name).relative_to(SERVICE)) if inside else ""


def _is_below(frame: FrameType | None, name: str) -> bool:
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def _files_above(frame: FrameType | None) -> set[str]:
    found = set()
    while frame is not None:
        found.add(_service_file(frame))
        frame = frame.f_back
    return found - {""}


async def trace_image(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files that one new image passes from Submit to its rows, and those that a withdrawal crosses."""
    from encoder_service.app import Server
    from encoder_service.config import Config
    from encoder_service.engine.model import load_model
    from prefill_client import EncoderClient, RowRequest
    from testing.checkpoints import write_checkpoint
    from testing.photos import photo

    config = Config(
        model=write_checkpoint(folder),
        listen="127.0.0.1:0",
        device="cpu",
        store_host_gib=0.25,
        store_prefault="no",
    )
    trace = Trace()
    model = load_model(config)
    threading.settrace(trace)  # before the stages start: threads take it over then
    server = Server(config, model)
    await server.start()
    try:
        async with await EncoderClient.connect(server.endpoint) as client:
            await _encode(client, RowRequest, photo(256, 256, 0))
            trace.clear()
            sys.settrace(trace)
            await _encode(client, RowRequest, photo(256, 256, 1))
            passed = sorted(trace.files)
            trace.clear()
            for first in range(2, 62, 6):  # on a busy machine all may be encoded before the caller leaves
                await _leave(client, RowRequest, [photo(512, 512, first + n) for n in range(6)])
                if trace.withdrawals:
                    break
            crossed = max(trace.withdrawals, key=len)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        await server.drain()
    return passed, sorted(crossed)


async def _encode(client: Any, request: Any, file: bytes) -> None:
    [submitted] = await client.submit([file])
    async with client.fetch([request(submitted.digest)], transports=["inline"]) as stream:
        async for outcome in stream:
            assert outcome.error is None, outcome.error


async def _leave(client: Any, request: Any, files: list[bytes]) -> None:
    """Ask for images, and leave before they are encoded."""
    submitted = await client.submit(files)
    async with client.fetch([request(image.digest) for image in submitted]) as stream:
        asking = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0.05)
        asking.cancel()
    await asyncio.sleep(0.5)


def measured_from_source() -> dict[str, int]:
    """Return the figures for which nothing has to run."""
    graph = entry_graph()
    lines, methods, collaborators = encoder_counts()
    return {
        "entries": len(graph),
        "layers": layers(graph),
        "arrows": sum(map(len, graph.values())),
        "encoder_lines": lines,
        "encoder_methods": methods,
        "encoder_collaborators": collaborators,
        "handed_functions": len(handed_functions()),
        "exports": exports(),
        "service_lines": service_lines(),
    }


def measure() -> dict[str, int]:
    """Return every figure of the table."""
    with TemporaryDirectory() as folder:
        passed, crossed = asyncio.run(trace_image(Path(folder)))
    found = measured_from_source() | {"image_files": len(passed), "withdraw_files": len(crossed)}
    return {name: found[name] for name in GOALS}


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    print("| what | now | goal |\n|---|---|---|")
    for name, (what, goal) in GOALS.items():
        print(f"| {what} | {found[name]} | {'≥' if name == 'exports' else '≤'} {goal} |")


if __name__ == "__main__":
    main()
