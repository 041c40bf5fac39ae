"""The engine: the threads that turn queued images into rows in the store. One that dies ends the process."""

import asyncio
import threading
from collections.abc import Callable

from encoder_contract.errors import UnavailableError
from encoder_service.engine.job_queue import JobQueue
from encoder_service.engine.model import Model
from encoder_service.engine.vit import Vit
from encoder_service.engine.workers import CopyOut, Prepare
from encoder_service.observability.metrics import Metrics
from encoder_service.store import Store


class Engine:
    """Workers on threads of their own, at work on different images of one queue: decode, ViT, copy-out."""

    def __init__(
        self,
        jobs: JobQueue,
        model: Model,
        store: Store,
        metrics: Metrics,
        *,
        batch_patches: int,
        decode_threads: int = 2,
        decode_pixels: int = 50_000_000,
    ) -> None:
        """Set the bounds: `decode_pixels` of sources in a batch that is decoded, and as many decoded one by one.

        The scheduler is to call an image of more than that large: one at a time is decoded beside them.
        """
        prepare = Prepare(jobs, model, metrics, max_patches=batch_patches, max_pixels=decode_pixels)
        copy_out = CopyOut(jobs, model, store, metrics)
        vit = Vit(jobs, model, store, metrics, copy_out, batch_patches=batch_patches)
        self._jobs = jobs
        # Not waited for by `stop`: it ends when the store is closed.
        self._migrator = self._thread("tier-migrator", store.keep_moving)
        self._threads = [
            self._thread("prepare", prepare.run),
            *(self._thread("prepare-apart", prepare.run_apart) for _ in range(decode_threads)),
            self._thread("vit", vit.run),
            self._thread("copy-out", copy_out.run, copy_out.drop),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._threads, self._migrator):
            thread.start()

    async def stop(self) -> None:
        """Let the workers finish what they are at, end the threads, and fail what is still queued."""
        self._jobs.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._jobs.fail_all(UnavailableError("the server is shutting down: use another one"))

    def _thread(self, name: str, *work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=work, name=name, daemon=True)

    def _run(self, work: Callable[[], None], after_death: Callable[[], None] = lambda: None) -> None:
        """Do the work of a thread. What it does not deal with itself would else stop a stage, and nobody would know."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever ends a worker ends the process
            self._jobs.abort(f"the server's thread {threading.current_thread().name} died", error)
            after_death()
