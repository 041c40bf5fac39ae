"""Capturing runs as CUDA graphs: kernels recorded once, then launched together."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

# A run over inputs that stay where they are: returns its rows, which the next run overwrites.
Run = Callable[[], Tensor]


class CudaCapture:
    """Captures runs as CUDA graphs that share their memory.

    All on one stream: libraries keep a workspace for every stream that they were called on.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """Return what runs the same kernels over the same inputs, in one launch; raises what the libraries do."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # libraries choose kernels and take workspaces on their first calls
                    run()
                # What other threads do meanwhile, DALI's for one, is no reason to give up.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    rows = run()
        except Exception:
            self._end_recording()
            raise
        current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return rows

        return replay

    def _end_recording(self) -> None:
        """Tell torch's allocator that a capture has ended, which torch itself omits when CUDA broke it off.

        It would take the next capture into the same memory for a mistake, and keep all memory that crosses streams in
        the belief that a capture is under way.
        """
        with suppress(RuntimeError):  # it knows: CUDA did not break it off
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
