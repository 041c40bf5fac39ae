"""Stores, and readers of their rows by handle."""

from pathlib import Path

import torch

from encoder_service.store import Store
from prefill_client import DeviceRows, SharedRows
from testing.stored import write

WIDTH = 64  # bfloat16: 128 bytes a row, 512 rows a page
PAGE_BYTES = 64 << 10


def make_store(folder, pages=16, device_pages=0):
    return Store(
        host_bytes=pages * PAGE_BYTES,
        device_bytes=device_pages * PAGE_BYTES,
        row_bytes=2 * WIDTH,
        segment_dir=str(folder),
        wait_s=0.0,
    )


def embedding(seed, tokens=1000):
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def shared_rows(handle):
    return reader(handle)(handle, WIDTH, "bfloat16")


def reader(handle):
    return DeviceRows if handle.memory else SharedRows


def flat(handle):
    """Return a copy of all bytes of a handle's rows."""
    return shared_rows(handle).copy().tobytes()


def as_bytes(rows):
    return rows.view(torch.uint8).numpy().tobytes()


def mappings_of(path):
    """Return the read-only mappings of a file in this process. The store's own mapping is writable."""
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if path in line and " r--s " in line
    ]


def scattered(store):
    """Put an embedding that no single run of free pages can hold; return its pin."""
    for n in range(16):
        write(store, bytes([n]), embedding(n, 512), (1, 1, 1)).release()
    for n in range(0, 16, 2):
        assert store.evict(bytes([n]))
    return write(store, b"wide", embedding(99, 2000), (1, 1, 1))
