"""A simulated CUDA device: the CUDA paths run on the CPU, and mistakes that a real device would hide are findings."""

from tests.simulated_gpu.cuda import simulated_gpu
from tests.simulated_gpu.device import SimulatedGpu

__all__ = ["SimulatedGpu", "simulated_gpu"]
