"""Generates the gRPC stubs from the proto file, or checks that the committed ones are not stale."""

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTOS = ["encoder_contract/v1/encoder.proto", "encoder_contract/v1/admin.proto"]
STUBS = [
    proto.replace(".proto", f"_pb2{suffix}")
    for proto in PROTOS
    for suffix in (".py", ".pyi", "_grpc.py", "_grpc.pyi")
]


def generate(out: Path) -> None:
    """Write the stubs below `out`, from the package root, so that their imports need no patching."""
    scripts = Path(sys.executable).parent
    arguments = [f"-I{ROOT}", f"--python_out={out}", f"--grpc_python_out={out}"]
    for plugin in ("mypy", "mypy_grpc"):
        arguments += [
            f"--plugin=protoc-gen-{plugin}={scripts / f'protoc-gen-{plugin}'}",
            f"--{plugin}_out=quiet:{out}",
        ]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments, *PROTOS], check=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the stubs beside the proto file")
    mode.add_argument("--check", action="store_true", help="fail when the committed stubs are stale")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = [s for s in STUBS if not _same(Path(folder) / s, ROOT / s)]
        if arguments.write:
            for stub in stale:
                shutil.copy(Path(folder) / stub, ROOT / stub)
            print(f"{len(stale)} of {len(STUBS)} stubs written")
            return 0
    for stub in stale:
        print(f"stale: proto/{stub}; run `make proto` and commit")
    return 1 if stale else 0


def _same(fresh: Path, committed: Path) -> bool:
    return committed.exists() and filecmp.cmp(fresh, committed, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
