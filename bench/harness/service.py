"""Benchmarks that run in an engine's environment, and the service beside them."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from testing.engine_environments import run_module
from testing.server_process import ServerProcess, running


def parsed_in(
    python: Path, module: str, parser: ArgumentParser, variables: Mapping[str, str] | None = None
) -> Namespace:
    """Parse the command line in the interpreter that has the engine; in another one, run the module there and exit."""
    parser.add_argument("--here", action="store_true", help="in this interpreter, which has the engine")
    args = parser.parse_args()
    if not args.here:
        sys.exit(run_module(python, module, "--here", *sys.argv[1:], variables=variables or {}))
    return args


def service_for_engines(model: Path, **settings: Any) -> AbstractContextManager[ServerProcess]:
    """Run the server that the variable ENCODER_SERVICE names, on the CPU, for the length of a `with` block."""
    return running(
        model,
        executable=Path(os.environ["ENCODER_SERVICE"]),
        devices="cpu",
        dtype="float32",
        store_host_gib=0.5,
        device_peak_tflops=0.1,
        **settings,
    )
