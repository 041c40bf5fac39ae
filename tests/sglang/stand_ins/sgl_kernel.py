"""Stands in for the build of SGLang's kernels for the CPU, which is on no index: what its plain CPU path calls.

Two functions copy page indexes between a request's page table and the list of its pages. All other names can be
imported, as SGLang does at its start, and raise when they are called.
"""

from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

__version__ = "0.4.10"

# Looked up by name when SGLang imports the models with linear attention, which do not run here.
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
):
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")


def _tables(requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield, for each request, its entries [begin, end) of the page table, and where their pages are in the list."""
    done = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        yield table[request, begin:end], slice(done, done + end - begin)
        done += end - begin


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor, pages: Tensor, _width: int
) -> None:
    """Write the list of pages into the page table [requests, tokens]."""
    for entries, place in _tables(requests, table, begins, ends):
        entries.copy_(pages[place])


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor, pages: Tensor, _width: int
) -> None:
    """Read the list of pages from the page table [requests, tokens]."""
    for entries, place in _tables(requests, table, begins, ends):
        pages[place] = entries.to(pages.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for the CPU")

    return absent
