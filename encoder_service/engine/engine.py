"""The engine: the threads that turn queued images into rows in the store. A lost device ends the process."""

import asyncio
import threading

from encoder_contract.errors import UnavailableError
from encoder_service.engine.job_queue import JobQueue
from encoder_service.engine.model import Model
from encoder_service.engine.workers import CopyOut, Prepare, Vit
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
        """Set the bounds: `decode_pixels` of sources in a batch that is decoded, and as many decoded one by one."""
        prepare = Prepare(jobs, model, metrics, max_patches=batch_patches, max_pixels=decode_pixels)
        copy_out = CopyOut(jobs, model, store, metrics)
        vit = Vit(jobs, model, store, metrics, copy_out, batch_patches=batch_patches)
        self._jobs = jobs
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("prepare", prepare.run),
                *[("prepare-apart", prepare.run_apart)] * decode_threads,
                ("vit", vit.run),
                ("copy-out", copy_out.run),
            )
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Let the workers finish what they are at, end the threads, and fail what is still queued."""
        self._jobs.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._jobs.fail_all(UnavailableError("the server is shutting down: use another one"))
