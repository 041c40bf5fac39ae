"""A store of a few pages, and embeddings for it."""

from collections.abc import Callable

import torch

from encoder_service.store import Store
from testing.stored import write

# The store of a whole server, in GiB. It is small, because a store that a test has closed may stay mapped until the
# next garbage collection: /dev/shm needs room for several, and a container has only 64 MB.
STORE_GIB = 0.04
WIDTH = 16  # float32: 64 bytes a row, 1024 rows a page
PAGE_BYTES = 64 << 10
PAGE_ROWS = PAGE_BYTES // (WIDTH * 4)
NewStore = Callable[..., Store]


def make_store(folder, host_pages=16, device_pages=0, **settings):
    return Store(
        host_bytes=host_pages * PAGE_BYTES,
        device_bytes=device_pages * PAGE_BYTES,
        row_bytes=4 * WIDTH,
        segment_dir=str(folder),
        **{"wait_s": 0.0} | settings,
    )


def address(number):
    return number.to_bytes(32, "big")


def embedding(seed, pages=1.0):
    tokens = max(1, int(pages * PAGE_ROWS))
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(pin, begin=0, end=None):
    return b"".join(pin.rows(begin, end))


def put(store, name, pages=1.0):
    write(store, name, embedding(name[0], pages), (1, 2, 2)).release()


def tier_of(store, address):
    """Return the tier that `pin` would find, without taking a pin; None if the address is not held."""
    return next((tier.name for tier in store.tiers if address in tier.entries), None)
