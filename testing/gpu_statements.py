"""Prints the statements that only a real GPU reaches: in CUDA's branches, and not run by the tests of this machine.

python -m testing.gpu_statements [--all]    # runs the tests on the simulated GPU first; --all: without running them
"""

import argparse
import ast
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("encoder_service", "prefill_client", "proto/encoder_contract")
TESTS = (
    "tests/encoder_service/devices/test_encoding_simulated.py",
    "tests/encoder_service/vision/test_towers_simulated.py",
    "tests/prefill_client/transport/test_device_simulated.py",
    "tests/prefill_client/test_vllm_simulated.py",
)
# Functions and classes that only CUDA's branches use, by file.
FUNCTIONS = {
    "attention.py": ("FlashAttention2", "FlashAttention3", "TorchVarlenAttention", "_replay_failure"),
    "dali.py": ("_owned",),
    "device.py": ("make_current",),
    "device_memory.py": ("CudaBytes", "_current", "_checked", "_owned", "_free"),
    "graphs.py": ("CudaCapture",),
    "registration.py": ("register_memory", "unregister_memory"),
    "tower.py": ("capture_graphs",),
    "ulysses.py": ("complete",),
}
CONDITIONS = ("is_cuda", "== 'cuda'", "startswith('cuda", "_stream is not None", "made is not None")
NEGATED = ("_stream is None", "== 'cpu'", "!= 'cuda'")


def statements(path: Path) -> set[int]:
    """Return the lines of the statements in CUDA's branches and functions."""
    found: set[int] = set()

    def add(body: list[ast.stmt]) -> None:
        inside = (each for node in body for each in ast.walk(node) if isinstance(each, ast.stmt))
        found.update(
            each.lineno
            for each in inside
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        )

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in FUNCTIONS.get(path.name, ()):
            add(node.body)
        elif isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if any(each in test for each in CONDITIONS) and not test.startswith("not "):
                add(node.body)
            elif any(each in test for each in NEGATED):
                add(node.orelse)
    return found


def all_statements() -> Iterator[tuple[Path, set[int]]]:
    """Yield each file with such statements, and their lines."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if lines := statements(path):
                yield path, lines


def run_tests(wanted: dict[str, set[int]]) -> dict[str, set[int]]:
    """Run the tests; return the lines of each file that ran. Only files with wanted lines are traced."""
    ran: dict[str, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _value: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in wanted:
            return None
        if event == "line":
            ran[name].add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        code = pytest.main(["-q", "-p", "no:xdist", "-o", "addopts=", *(str(ROOT / test) for test in TESTS)])
    finally:
        sys.settrace(None)
        threading.settrace(None)
    if code:
        raise SystemExit(code)
    return ran


def main() -> None:
    """Print each file's lines that did not run, and how many there are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="print all of CUDA's statements, without running tests"
    )
    args = parser.parse_args()
    wanted = {str(path): lines for path, lines in all_statements()}
    ran = {} if args.all else run_tests(wanted)
    total = 0
    for name, lines in wanted.items():
        left = sorted(lines - ran.get(name, set()))
        total += len(left)
        if left:
            print(f"{Path(name).relative_to(ROOT)}: {len(left)}: {', '.join(map(str, left))}")
    print(f"{total} of {sum(map(len, wanted.values()))} statements")


if __name__ == "__main__":
    main()
