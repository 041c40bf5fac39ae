"""Processes for the stress test of the store: an owner that churns a store and hands out handles, and readers.

    python -m tests.store_processes owner FOLDER      listens on FOLDER/socket until it is killed
    python -m tests.store_processes reader FOLDER     reads until it is killed; prints counts every 20 reads
    python -m tests.store_processes device FOLDER     the same, for rows in the device tier

They talk like the two ends of a Fetch stream: the reader names an address, the owner pins it and answers with a handle,
and holds the pin until the reader answers or closes its end of the socket. Rows are a function of their address, so
every reader knows the right rows.
"""

import random
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np

from encoder_contract.errors import OverloadedError, StaleHandleError
from tests.waiting import PATIENCE_S

WIDTH = 128  # float32: 512 bytes a row, 128 rows a page
ADDRESSES = 60
HOST_PAGES, DEVICE_PAGES = 96, 24  # about a third of what all addresses take: the store evicts all the time
PAGE_BYTES = 64 << 10


def rows_of(number: int) -> np.ndarray:
    """Return the rows [tokens, WIDTH] of address `number`; all values differ."""
    tokens = 1 + number * 997 % 700
    return np.arange(tokens * WIDTH, dtype=np.float32).reshape(tokens, WIDTH) + number / 64


def own(folder: Path) -> None:
    """Churn a store from several threads and serve every reader that connects."""
    import torch

    from encoder_service.store import Pin, Store
    from testing.stored import write as write_rows

    torch.set_num_threads(1)
    store = Store(
        host_bytes=HOST_PAGES * PAGE_BYTES,
        device_bytes=DEVICE_PAGES * PAGE_BYTES,
        row_bytes=4 * WIDTH,
        segment_dir=str(folder),
        wait_s=0.5,
    )
    tensors = [torch.from_numpy(rows_of(number)) for number in range(ADDRESSES)]

    def write(number: int) -> None:
        with suppress(OverloadedError):
            write_rows(store, bytes([number]), tensors[number], (1, 1, number)).release()

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            write(rng.randrange(ADDRESSES))
            if rng.random() < 0.2:
                store.evict(bytes([rng.randrange(ADDRESSES)]))

    # Another thread may be moving the rows: on a busy machine, that takes seconds.
    reach = {True: store.moves.to_device, False: partial(Pin.to_host, wait_s=PATIENCE_S)}

    def serve(reader: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                request = reader.recv()
                if request is None:
                    reader.send(store.stats().pins)
                    continue
                number, on_device = request
                write(number)
                with store.pin(bytes([number])) or write_rows(
                    store, bytes([number]), tensors[number], (1, 1, 0)
                ) as pin:
                    reach[on_device](pin)
                    reader.send(pin.handle())
                    reader.recv()

    listener = Listener(str(folder / "socket"))
    threading.Thread(target=store.moves.keep_moving, daemon=True).start()
    for seed in (1, 2):
        threading.Thread(target=churn, args=(seed,), daemon=True).start()
    while True:
        threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()


def read(folder: Path, *, on_device: bool = False) -> None:
    """Read held rows, which must be right, and rows of old handles, which must be right or stale."""
    from prefill_client import DeviceRows, Handle, SharedRows

    def rows_in(handle: Handle) -> SharedRows:
        return (DeviceRows if handle.memory else SharedRows)(handle, WIDTH, "float32")

    owner = Client(str(folder / "socket"))
    rng = random.Random()
    old = deque(maxlen=8)
    held = stale = outlived = 0
    while True:
        number = rng.randrange(ADDRESSES)
        owner.send((number, on_device))
        handle = owner.recv()
        with rows_in(handle).reading() as array:
            assert np.array_equal(array, rows_of(number)), f"held {number} is wrong"
        if on_device and not handle.memory:
            owner.send("done")
            continue
        held += 1
        owner.send("done")
        old.append((number, handle))
        before, outdated = rng.choice(old)
        try:
            copied = rows_in(outdated).copy()
            assert np.array_equal(copied, rows_of(before)), f"{before} is wrong, but not stale"
            outlived += 1
        except StaleHandleError:
            stale += 1
        if held % 20 == 0:
            print(held, outlived, stale, flush=True)


if __name__ == "__main__":
    {"owner": own, "reader": read, "device": partial(read, on_device=True)}[sys.argv[1]](Path(sys.argv[2]))
