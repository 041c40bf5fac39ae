"""The releases of SGLang that this package supports."""

import re
from importlib.metadata import version

OLDEST, TOO_NEW = (0, 5, 21), (0, 5, 24)


def check_release(installed: str | None = None) -> None:
    """Raise `RuntimeError` for an unsupported release of SGLang.

    The packages that SGLang loads call this on import, and import their modules themselves. Otherwise SGLang would only
    log a warning about a module that cannot be imported, and continue with its own tower.
    """
    installed = installed or version("sglang")
    numbers = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    if not OLDEST <= numbers < TOO_NEW:
        raise RuntimeError(
            f"prefill_client.sglang supports SGLang >={_dotted(OLDEST)},<{_dotted(TOO_NEW)}, but {installed} is "
            "installed: install a supported release, or unset SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE and "
            "SGLANG_EXTERNAL_MODEL_PACKAGE"
        )


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
