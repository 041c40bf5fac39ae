"""Rows in a store, written as its writers do."""

from torch import Tensor

from encoder_contract.geometry import Grid
from encoder_service.store import Pin, Store
from encoder_service.store.copies import copy_bytes
from encoder_service.store.tensors import flat
from encoder_service.store.tier import Entry


def write(store: Store, address: bytes, rows: Tensor, grid: Grid, holder: str = "") -> Pin:
    """Write `rows` [tokens, width], on any device, unless they are held; return a pin on the rows of the address.

    Raises `OverloadedError` if everything is in use.
    """
    assert rows.shape[1] * rows.dtype.itemsize == store.layout.row_bytes, (rows.shape, rows.dtype)
    reserved = store.reserve(address, len(rows), grid, holder)
    if reserved is None:
        raise store.full_error()
    if not isinstance(reserved, Entry):
        return reserved
    with store.filling(reserved):
        copy_bytes(reserved.tier.pieces(reserved), [flat(rows)])
    [pin] = store.commit([reserved])
    return pin
