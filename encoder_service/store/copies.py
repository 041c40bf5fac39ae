"""Copies bytes of rows between the memories of a store."""

from collections.abc import Sequence

import numpy as np

from encoder_contract.extents import View, pairs


def copy_bytes(targets: Sequence[View], sources: Sequence[View]) -> None:
    """Copy bytes into others of equal total length, possibly split elsewhere, and wait for completion.

    Other threads run meanwhile. As for `copy_tensors`, if some of the memory is a GPU's.
    """
    if not all(isinstance(view, memoryview) for view in (*targets, *sources)):
        from encoder_service.store.tensors import copy_tensors  # imports torch

        copy_tensors(targets, sources)
        return
    for target, source in pairs(targets, sources):
        np.copyto(np.asarray(target), np.asarray(source))
