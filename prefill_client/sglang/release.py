"""The releases of SGLang that this package knows."""

import re
from importlib.metadata import version

OLDEST, TOO_NEW = (0, 5, 21), (0, 5, 24)


def check_release(installed: str | None = None) -> None:
    """Raise `RuntimeError` for a release of SGLang whose names and calls this package does not know.

    The packages that SGLang loads call this as they are imported, and import their modules themselves: SGLang logs a
    warning about a module that cannot be imported, and goes on with its own tower.
    """
    installed = installed or version("sglang")
    numbers = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    if not OLDEST <= numbers < TOO_NEW:
        raise RuntimeError(
            f"prefill_client.sglang is for SGLang >={_said(OLDEST)},<{_said(TOO_NEW)}, and this is {installed}: "
            "install one of those, or unset SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE and SGLANG_EXTERNAL_MODEL_PACKAGE"
        )


def _said(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
