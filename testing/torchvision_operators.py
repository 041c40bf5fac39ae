"""Makes torchvision's wheel from PyPI importable beside PyTorch's build for the CPU: run it in their environment.

That wheel expects two operators that only its CUDA build has, and that we do not use. If PyTorch's own index can be
reached, its wheel for the CPU is installed instead, and this changes nothing.
"""

import sysconfig
from importlib.metadata import version
from pathlib import Path

# A finder that defines the operators just before torchvision is imported: torch itself is imported no earlier.
OPERATORS = '''"""Defines the operators whose absence keeps torchvision from being imported."""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    defined = False

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not self.defined:
            self.defined = True
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
'''


def add_torchvision_operators(site: Path) -> None:
    """Make torchvision importable from `site`, a folder of packages."""
    (site / "_torchvision_operators.py").write_text(OPERATORS)
    (site / "torchvision_operators.pth").write_text("import _torchvision_operators\n")


def main() -> None:
    """Do so for this interpreter, if its torchvision is a CUDA build and its torch is not."""
    if "+cpu" in version("torch") and "+cpu" not in version("torchvision"):
        add_torchvision_operators(Path(sysconfig.get_path("purelib")))


if __name__ == "__main__":
    main()
