"""Triton's names without Triton, which takes 900 MB and does nothing on a CPU: what SGLang itself ships for Macs.

SGLang installs it only where it takes the machine for a Mac, so it is told so while it does.
"""

import importlib.util
import platform
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock


class _Installed(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, _module: ModuleType) -> None:
        """Do nothing: it was executed when it was installed."""


class _AtFirstLookUp(MetaPathFinder):
    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != "triton":
            return None
        sys.meta_path.remove(self)
        _install()
        module = sys.modules["triton"]
        module.__spec__ = importlib.util.spec_from_loader("triton", _Installed(module), is_package=True)
        return module.__spec__


def _install() -> None:
    import torch

    path = Path(__file__).with_name("sglang") / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    find_spec = importlib.util.find_spec
    with (
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch.object(platform, "machine", return_value="arm64"),
        mock.patch.object(torch.backends.mps, "is_available", return_value=True),
        mock.patch.object(
            importlib.util, "find_spec", lambda n, p=None: None if n == "triton" else find_spec(n, p)
        ),
    ):
        stubs.install_platform_stubs()


sys.meta_path.insert(0, _AtFirstLookUp())
