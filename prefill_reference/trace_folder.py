"""Where the service leaves the traces of its requests: a folder that holds the newest of them."""

from pathlib import Path

from prefill_client import Trace

# At some tens of kilobytes each, a few megabytes: enough to look at what just happened.
KEPT_TRACES = 100
PATTERN = "chatcmpl-*.json"


class TraceFolder:
    """Writes a trace file for each request, named as its answer is, and removes the oldest over the bound."""

    def __init__(self, folder: Path, *, kept: int = KEPT_TRACES) -> None:
        """Make the folder; raises `OSError` when that is not possible."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._kept = kept

    def keep(self, trace: Trace) -> None:
        """Write a trace; blocks, so not for the event loop. Raises `OSError`."""
        trace.write(self._folder / f"chatcmpl-{trace.request_id}.json")
        files = sorted(self._folder.glob(PATTERN), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: -self._kept]:
            file.unlink(missing_ok=True)
