"""Makes a virtual environment in which SGLang starts on a CPU; changes no code of SGLang's.

Three things keep it from starting: its kernels for the CPU are on no index, Triton is imported wherever it runs, and
torchvision's wheel expects operators that only its CUDA build has.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

from testing.torchvision_operators import add_torchvision_operators

STAND_INS = Path(__file__).with_name("stand_ins")


def main() -> None:
    """Put the stand-ins into the site-packages of the interpreter that runs this."""
    site = Path(sysconfig.get_path("purelib"))
    add_torchvision_operators(site)
    for module in STAND_INS.glob("*.py"):
        shutil.copy(module, site)
    (site / "triton_on_cpu.pth").write_text("import _triton_on_cpu\n")
    sys.stdout.write(f"sglang can start in {sys.prefix}\n")


if __name__ == "__main__":
    main()
