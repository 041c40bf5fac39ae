"""Engines that get other weights while they run, as trainers do it, and the service beside them."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.engines_parts.sides import TIMEOUT_S, Cores, SglangSides, Side, VllmSides, post, stop
from bench.updates_parts.chats import PHOTOS, REPEATS, Prompts, References, ask
from bench.updates_parts.versions import START
from testing.server_process import ServerProcess


class UpdatedEngine:
    """An engine with the service; `kind` is vllm or sglang."""

    def __init__(self, kind: str, side: Side) -> None:
        self.kind = kind
        self.url = side.url
        self._service = side.processes["service"]

    def load(self, model: Path, *, empties_caches: bool) -> None:
        """Load other weights into the engine: requests that run end before, and others wait.

        SGLang empties its caches at every update. Raises `OSError` if a call fails.
        """
        if self.kind == "sglang":
            post(f"{self.url}/update_weights_from_disk", {"model_path": str(model)})
            return
        post(f"{self.url}/pause?mode=wait&clear_cache={empties_caches}", None)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        post(f"{self.url}/collective_rpc", reload)
        post(f"{self.url}/resume", None)

    def reload_service(self, model: Path) -> None:
        """Load other weights into the service, as an operator does. Raises `RuntimeError` if that fails."""
        assert isinstance(self._service, ServerProcess)
        command = Path(sys.executable).with_name("encoder-service")
        done = subprocess.run(
            [command, "reload", model, "--server", self._service.endpoint],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"encoder-service reload ended with {done.returncode}: {done.stdout}{done.stderr}"
            )

    def images(self, encoder: str = "") -> float:
        """Return how many images the engine got from the service; with `own_tower_`, how many it encoded itself."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        name = f"{self.kind}:encoder_service_{encoder}images_total"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextmanager
def started(
    kind: str, versions: Mapping[str, Path], prompts: Prompts, folder: Path
) -> Iterator[tuple[UpdatedEngine, References]]:
    """Run an engine with the service for the length of a `with` block, with the weights of the start.

    Before it runs alone, an engine of each version has answered all prompts by its own tower.
    """
    with ExitStack() as held:
        ours = _side(kind, "ours", versions[START], folder)
        held.callback(stop, ours)
        with ExitStack() as held_own:
            own = {}
            for version, model in versions.items():
                own[version] = _side(kind, "own", model, folder)
                held_own.callback(stop, own[version])
            for side in (*own.values(), ours):
                side.engines[0].wait_until_it_answers()
            references = {
                version: [ask(side.url, prompts.content(REPEATS * picture)) for picture in range(PHOTOS)]
                for version, side in own.items()
            }
        yield UpdatedEngine(kind, ours), references


def _side(kind: str, name: str, model: Path, folder: Path) -> Side:
    """Start the processes of a side on all cores, and do not wait for the engine."""
    every = frozenset(os.sched_getaffinity(0))
    side = Side(name, Cores(every, every))
    (VllmSides(model, folder) if kind == "vllm" else SglangSides(model)).start(side, 1)
    return side
