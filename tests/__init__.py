"""The tests, which mirror the packages."""

import os

import torch

# Without a GPU, Triton's kernels run in its interpreter: it must know when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
