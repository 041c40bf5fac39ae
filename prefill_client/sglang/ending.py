"""Ends requests in SGLang's scheduler whose images have no rows. An exception in a forward would end the engine.

The model returns zeros in place of missing rows, and records the image here. After the forward, before SGLang answers
or caches its results, every request of the batch with such an image ends with the status of that image.
"""

import logging
from functools import wraps
from http import HTTPStatus
from typing import Any

from sglang.srt.managers import mm_schedule
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

_log = logging.getLogger("sglang.encoder_service")


class ImagesWithoutRows:
    """The images without rows in the current forward, the same on all ranks. Used by the thread that runs forwards."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[HTTPStatus, str]] = {}

    def add(self, item: Any, status: HTTPStatus, why: str) -> None:
        """End the requests of this batch that have this image with `status` and the reason `why`."""
        self._found[item.hash] = status, why

    def watch_forwards(self) -> None:
        """Patch the scheduler of this process to end the requests of these images after each forward. Call it once."""
        from sglang.srt.managers.scheduler import Scheduler  # imported late, because it imports the models

        run_batch = Scheduler.run_batch

        @wraps(run_batch)
        def watched(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = run_batch(scheduler, batch, *args, **kwargs)
            if self._found:
                self._end_requests(scheduler, batch)
            return result

        Scheduler.run_batch = watched

    def _end_requests(self, scheduler: Any, batch: Any) -> None:
        found, self._found = self._found, {}
        for image in found:
            mm_schedule.embedding_cache.free(image, None)
        generating = batch.decoding_reqs or ()  # in a mixed batch, requests that already have their rows
        for request in batch.reqs:
            if request in generating or request.multimodal_inputs is None:
                continue
            images = [item.hash for item in request.multimodal_inputs.mm_items]
            wrong = next((index for index, image in enumerate(images) if image in found), None)
            if wrong is not None:
                status, why = found[images[wrong]]
                _end(scheduler, request, FINISH_ABORT(f"image {wrong}: {why}", status))


def _end(scheduler: Any, request: Any, reason: Any) -> None:
    """Answer the caller, and drop the request without caching the results of the forward."""
    _log.error("request %s ends with %d: %s", request.rid, reason.status_code, reason.message)
    answer = AbortReq(rid=request.rid, finished_reason=reason.to_json())
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
    if request is scheduler.chunked_req:  # SGLang drops it before its next chunk
        scheduler._pending_chunked_abort_req = request
    else:  # SGLang drops it when it processes the result of this forward
        request.skip_radix_cache_insert = True
        request.to_finish = reason
