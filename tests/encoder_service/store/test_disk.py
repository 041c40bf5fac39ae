"""The disk tier: rows come back bit for bit, or not at all."""

import errno
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_contract.fleet_key import FleetKey
from encoder_contract.framing import checksum
from encoder_contract.geometry import Grid
from encoder_service.store import DiskError, Store
from encoder_service.store import disk as disk_module
from encoder_service.store.disk import HEADER_BYTES, Disk, DiskFile
from encoder_service.store.moves import SAMPLED, WRITE_CHANCE
from testing.stored import write as write_rows
from tests.small_store import address
from tests.waiting import PATIENCE_S

ROW_BYTES = 512
GRID = Grid(1, 4, 4)
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rows"


Start = Callable[..., Disk]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Return a function that opens the tier in the folder. It closes the one before, as a restart does."""
    opened: list[Disk] = []

    def start(max_bytes: int = MIB, row_bytes: int = ROW_BYTES, **options: Any) -> Disk:
        if opened:
            opened.pop().close()
        opened.append(Disk(folder, max_bytes, row_bytes, **options))
        return opened[0]

    yield start
    if opened:
        opened[0].close()


def rows_of(number: int, tokens: int) -> bytes:
    """Rows that follow from the address, so that rows of another are noticed."""
    return random.Random(number).randbytes(tokens * ROW_BYTES)


def write(disk: Disk, number: int, tokens: int = 40, holder: str = "") -> None:
    views = [memoryview(rows_of(number, tokens))]
    disk.write(address(number), tokens, GRID, views, checksum(views), holder)


def read(disk: Disk, number: int) -> bytes | None:
    """The rows of an address, None for a miss."""
    if (file := disk.find(address(number))) is None:
        return None
    into = bytearray(file.rows_bytes)
    return bytes(into) if disk.read(file, [memoryview(into)]) is not None else None


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file() and path.name[64:65] == "-"]


@pytest.mark.parametrize("at", [0, 8], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("row_bytes", [4096, 512, 24])
def test_rows_come_back_after_a_restart(start: Start, row_bytes: int, at: int) -> None:
    memory = memoryview(mmap.mmap(-1, 2 * MIB))[at : at + 300 * row_bytes]
    memory[:] = rows = random.Random(1).randbytes(300 * row_bytes)
    pages = [memory[: 104 * row_bytes], memory[104 * row_bytes :]]
    disk = start(MIB * 8, row_bytes)
    disk.write(address(1), 300, GRID, pages, checksum(pages))
    disk = start(MIB * 8, row_bytes)
    file = disk.find(address(1))
    assert file is not None
    assert file.name == DiskFile(address(1), 300, GRID, row_bytes).name
    into = bytearray(len(rows))
    assert disk.read(
        file, [memoryview(into)[: 7 * row_bytes], memoryview(into)[7 * row_bytes :]]
    ) == checksum(pages)
    assert into == rows
    assert (len(disk), disk.used_bytes, disk.hits, disk.damaged) == (1, HEADER_BYTES + len(rows), 1, 0)


def test_the_least_recently_used_makes_room(folder: Path, start: Start) -> None:
    left: list[bytes] = []
    size = HEADER_BYTES + 40 * ROW_BYTES
    disk = start(3 * size, on_drop=left.append)
    for number in range(3):
        write(disk, number)
    assert read(disk, 0) == rows_of(0, 40)
    write(disk, 3)
    write(disk, 4, tokens=3000)  # larger than the tier
    assert left == [address(1)]
    assert [read(disk, number) is not None for number in range(5)] == [True, False, True, True, False]
    assert (disk.used_bytes, disk.evictions, len(files(folder))) == (3 * size, 1, 3)
    disk = start(size)
    assert len(disk) == len(files(folder)) == 1, "a smaller limit holds from the start"


DAMAGES = ("cut", "bit", "swapped", "zeros", "longer", "header", "empty")


def damage(path: Path, how: str, others: list[Path], source: random.Random) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "cut":
            data = data[: source.randrange(len(data))]
        case "bit":
            at = source.randrange(HEADER_BYTES, len(data))
            data[at] ^= 1 << source.randrange(8)
        case "swapped":
            data = bytearray(source.choice([other for other in others if other != path]).read_bytes())
        case "zeros":
            begin = source.randrange(HEADER_BYTES, len(data) - 8)
            data[begin:] = bytes(len(data) - begin)
        case "longer":
            data += bytes(4096)
        case "header":
            data[source.randrange(72)] ^= 1 << source.randrange(8)
        case _:
            data = bytearray()
    path.write_bytes(data)


@pytest.mark.parametrize("before_start", [True, False])
def test_damaged_files_are_misses_and_removed(folder: Path, start: Start, before_start: bool) -> None:
    source = random.Random(5)
    disk = start(64 * MIB)
    count = 20 * len(DAMAGES)
    for number in range(count):
        write(disk, number, tokens=8 + number % 2)
    paths = sorted(files(folder))
    assert len(paths) == count
    sound = {path: path.read_bytes() for path in paths}
    for place, path in enumerate(paths):
        damage(path, DAMAGES[place % len(DAMAGES)], paths, source)
    changed = sum(path.read_bytes() != data for path, data in sound.items())
    if before_start:
        disk = start(64 * MIB)
    results = [read(disk, number) for number in range(count)]
    wrong = [
        number for number, rows in enumerate(results) if rows not in (None, rows_of(number, 8 + number % 2))
    ]
    assert wrong == []
    assert (results.count(None), disk.damaged, len(files(folder))) == (changed, changed, count - changed)
    assert not disk.is_off


def test_a_file_that_somebody_removed_is_a_miss(folder: Path, start: Start) -> None:
    disk = start()
    write(disk, 1)
    files(folder)[0].unlink()
    assert read(disk, 1) is None
    assert (len(disk), disk.used_bytes, disk.is_off) == (0, 0, False)


def test_foreign_files_are_left_alone(folder: Path, start: Start) -> None:
    foreign = [folder / name for name in ("notes.txt", "ab/x", f"ab/{'0' * 64}-1-1-1", "cd/y.tmp")]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    disk = start()
    write(disk, 1)
    disk.clear()
    assert [path.read_text() for path in foreign] == ["mine"] * 4


def test_only_one_server_uses_a_folder(folder: Path, start: Start) -> None:
    start()
    with pytest.raises(DiskError, match="in use by another server"):
        Disk(folder, MIB, ROW_BYTES)
    start()


@pytest.mark.parametrize("kind", ["tmpfs", "a file", "unwritable"])
def test_a_folder_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, kind: str) -> None:
    match kind:
        case "tmpfs":
            folder, why = Path("/dev/shm") / f"disk-{os.getpid()}", "is on tmpfs, which is memory"
        case "a file":
            folder, why = tmp_path / "file", "File exists"
            folder.write_text("")
        case _:
            folder, why = Path("/proc/rows"), "cannot be used"
    try:
        with pytest.raises(DiskError, match=why) as raised:
            Disk(folder, MIB, ROW_BYTES)
        assert "\n" not in str(raised.value)
    finally:
        if kind == "tmpfs":
            folder.rmdir()


@pytest.mark.attack("a folder of the disk tier that another user may write")
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o700])
def test_a_folder_that_other_users_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    folder.chmod(mode)
    if mode == 0o700:  # then the owner is another user
        if os.geteuid():
            folder = Path("/usr")
        else:
            os.chown(folder, 1000, 1000)
    with pytest.raises(DiskError, match="could put wrong rows there"):
        Disk(folder, MIB, ROW_BYTES)
    if os.access(folder, os.W_OK):
        Disk(folder / "new", MIB, ROW_BYTES).close()


CHANGED = {"writable": 0o602, "unreadable": 0, "another's": 0o600}
ODD = ("link", "dangling link", "pipe", "folder", "full folder", "socket", *CHANGED)


def make_odd(path: Path, how: str) -> None:
    """Replace a file by what the server must not open."""
    if how in CHANGED:
        path.chmod(CHANGED[how])
        if how == "another's" and not os.geteuid():
            os.chown(path, 1000, 1000)
        return
    data = path.read_bytes()
    path.unlink()
    match how:
        case "link":
            elsewhere = path.parent.with_name("elsewhere")
            elsewhere.write_bytes(data)
            path.symlink_to(elsewhere)
        case "dangling link":
            path.symlink_to(path.parent.with_name("nothing"))
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"/proc/self/fd/{(opened := os.open(path.parent, os.O_PATH))}/{path.name[:16]}")
                os.close(opened)
            path.with_name(path.name[:16]).rename(path)
        case _:
            path.mkdir()
            if how == "full folder":
                (path / "x").write_text("mine")


@pytest.mark.attack("links, pipes and files of others in that folder")
@pytest.mark.parametrize("before_start", [True, False])
@pytest.mark.parametrize("how", ODD)
def test_what_is_no_file_of_ours_is_a_miss_and_nothing_else_fails(
    folder: Path, start: Start, how: str, before_start: bool
) -> None:
    disk = start()
    for number in (1, 2):
        write(disk, number)
    path = next(path for path in files(folder) if path.name.startswith(address(1).hex()))
    make_odd(path, how)
    if before_start:
        disk = start()
    # root may read any file, and others cannot give one away
    is_sound = not os.geteuid() if how == "unreadable" else os.geteuid() and how == "another's"
    assert read(disk, 1) == (rows_of(1, 40) if is_sound else None)
    assert read(disk, 2) == rows_of(2, 40)
    write(disk, 1)
    assert read(disk, 1) == (None if "folder" in how else rows_of(1, 40))
    assert (disk.is_off, read(disk, 2)) == (False, rows_of(2, 40))


def test_rows_are_bound_to_the_key(start: Start) -> None:
    keys = [FleetKey([bytes([65 + number]) * 32]) for number in range(2)]
    rotated = FleetKey([b"B" * 32, b"A" * 32])
    disk = start(key=keys[0])
    write(disk, 1)
    for key, found in ((keys[0], True), (rotated, True), (None, True), (keys[1], False)):
        disk = start(key=key)
        assert (read(disk, 1) == rows_of(1, 40)) == found
        assert disk.damaged == (not found)
    disk = start()
    write(disk, 1)
    disk = start(key=keys[0])
    assert read(disk, 1) is None, "it has no signature"


@pytest.mark.attack("forged rows on the disk")
def test_a_forger_without_the_key_cannot_change_rows(folder: Path, start: Start) -> None:
    key = FleetKey([b"A" * 32])
    disk = start(key=key)
    write(disk, 1)
    (path,) = files(folder)
    data = path.read_bytes()
    forged = rows_of(2, 40)
    file = disk.find(address(1))
    assert file is not None
    header = file.header(checksum([memoryview(forged)]), data[72:104])
    path.write_bytes(header + data[len(header) : HEADER_BYTES] + forged)
    assert read(disk, 1) is None
    assert disk.damaged == 1


def test_rows_of_another_size_are_neither_torn_nor_removed(folder: Path, start: Start) -> None:
    disk = start()
    for number in range(3):
        write(disk, number)
    other = start(row_bytes=ROW_BYTES // 2)
    assert (other.damaged, len(files(folder)), other.files(), address(0) in other) == (0, 3, [], False)
    disk = start()
    assert [read(disk, number) for number in range(3)] == [rows_of(number, 40) for number in range(3)]
    used_bytes = disk.used_bytes
    other = start(used_bytes, ROW_BYTES // 2)
    views = [memoryview(rows_of(7, 20))]
    other.write(address(7), 40, GRID, views, checksum(views))
    assert (len(other), read(other, 7)) == (3, rows_of(7, 20)), "they make room"


@pytest.mark.attack("a tenant that fills the disk tier")
def test_a_flood_takes_only_the_room_of_its_holders_share(start: Start) -> None:
    def write_of(disk: Disk, holder: str, numbers: range) -> None:
        for number in numbers:
            write(disk, number, holder=holder)

    size = 20 * (HEADER_BYTES + 40 * ROW_BYTES)
    disk = start(size)
    write_of(disk, "alice", range(12))
    write_of(disk, "mallory", range(100, 150))
    assert sum(address(number) in disk for number in range(12)) == 10
    disk = start(size)
    write_of(disk, "mallory", range(200, 250))
    assert sum(address(number) in disk for number in range(12)) == 10, "nor after a restart"
    assert sum(address(number) in disk for number in range(200, 250)) == 10


def test_of_two_files_of_an_embedding_a_start_keeps_the_last(folder: Path, start: Start) -> None:
    size = HEADER_BYTES + 40 * ROW_BYTES
    disk = start(3 * size)
    write(disk, 1)
    [file] = files(folder)
    other = folder / f"{file.name[:-16]}{disk_module.holder_tag('another')}"
    shutil.copy(file, other)
    os.utime(file, ns=(0, 0))
    disk = start(3 * size)
    assert (files(folder), disk.used_bytes, disk.damaged) == ([other], size, 1)
    for number in range(2, 8):
        write(disk, number)
        assert read(disk, number) == rows_of(number, 40)
    assert (len(disk), len(files(folder)), disk.used_bytes) == (3, 3, 3 * size)


def test_a_folder_in_place_of_the_open_one_is_not_used(folder: Path, start: Start) -> None:
    disk = start()
    write(disk, 1)
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    write(disk, 2)
    assert [read(disk, number) for number in (1, 2)] == [rows_of(1, 40), rows_of(2, 40)]
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("does", "number"), [("write", errno.ENOSPC), ("read", errno.EIO)])
def test_a_disk_that_fails_turns_the_tier_off_with_a_warning(
    folder: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    does: str,
    number: int,
) -> None:
    left: list[bytes] = []
    disk = start(on_drop=left.append)
    write(disk, 1)
    caplog.clear()

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_module, "_move_piece", fails)
    if does == "write":
        write(disk, 2)
    else:
        assert read(disk, 1) is None
    assert (disk.is_off, len(disk), left) == (True, 0, [address(1)])
    write(disk, 3)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"store: the disk tier is off until the next start, {folder}: {os.strerror(number)}"
    ]
    monkeypatch.undo()
    disk = start()
    assert read(disk, 1) == rows_of(1, 40), "nothing is lost"
    assert len(files(folder)) == 1


WRITES = """
import itertools, sys
from pathlib import Path
from tests.encoder_service.store.test_disk import MIB, ROW_BYTES, write
from encoder_service.store.disk import Disk
disk = Disk(Path(sys.argv[1]), 2 * MIB, ROW_BYTES)
print("open", flush=True)
for number in itertools.count(int(sys.argv[2])):
    write(disk, number, tokens=1 + number % 200)
"""


def test_killed_writers_leave_right_rows_or_none(folder: Path) -> None:
    right = 0
    for number in range(8):
        first = 10_000 * number
        with subprocess.Popen(
            [sys.executable, "-c", WRITES, str(folder), str(first)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"open\n"
            while len(files(folder)) < 20:
                assert writer.poll() is None, "it ended by itself"
                time.sleep(0.001)  # leaves the core to the writer
            writer.send_signal(signal.SIGKILL)
        disk = Disk(folder, 2 * MIB, ROW_BYTES)
        assert not list(folder.glob("*.tmp"))
        for file in disk.files():
            found = int.from_bytes(file.address, "big")
            assert read(disk, found) == rows_of(found, 1 + found % 200)
            right += 1
        assert disk.used_bytes <= 2 * MIB
        disk.clear()
        disk.close()
    assert right >= 8 * 10


# In the store

WIDTH = 128  # bfloat16: 256 bytes a row


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Iterator[Store]:
    store = small_store(folder, tmp_path)
    yield store
    store.close()


def small_store(folder: Path, tmp_path: Path, **changes: object) -> Store:
    return Store(
        host_bytes=4 * MIB, row_bytes=2 * WIDTH, segment_dir=str(tmp_path), wait_s=PATIENCE_S,
        disk_folder=folder, disk_bytes=64 * MIB, **changes,
    )  # fmt: skip


def tensor(number: int, tokens: int = 1024) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def put(store: Store, number: int) -> None:
    write_rows(store, address(number), tensor(number), GRID).release()


def move_all(store: Store) -> None:
    while store.moves.move_once():
        pass


def loaded(store: Store, number: int) -> torch.Tensor | None:
    future = store.moves.load_later(address(number))
    pin = future.result() if future is not None else store.pin(address(number))
    if pin is None:
        return None
    with pin:
        data = b"".join(pin.rows())
        assert pin.checksum() == checksum([memoryview(data)])
        assert pin.grid == GRID
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, WIDTH)


def test_rows_leave_the_host_for_the_disk_ahead_of_need_and_come_back(store: Store) -> None:
    for number in range(40):  # 10 MiB
        put(store, number)
        move_all(store)
    assert all(store.contains(address(number)) for number in range(40))
    host, disk = store.stats().tiers
    assert (host.name, disk.name) == ("host", "disk")
    assert disk.entries >= 24
    assert host.entries + disk.entries == 40
    for number in range(40):
        rows = loaded(store, number)
        assert rows is not None
        assert torch.equal(rows, tensor(number))
        assert store.grid(address(number)) == GRID
        move_all(store)
    assert set(store.grids()) == {address(number) for number in range(40)}


def test_a_restarted_store_has_what_was_on_the_disk(store: Store, folder: Path, tmp_path: Path) -> None:
    for number in range(40):
        put(store, number)
        move_all(store)
    on_disk = {path.name[:64] for path in files(folder)}
    store.close()
    again = small_store(folder, tmp_path)
    try:
        for number in range(40):
            held = address(number).hex() in on_disk
            assert again.contains(address(number)) == held
            rows = loaded(again, number)
            assert (rows is not None) == held
            assert rows is None or torch.equal(rows, tensor(number))
            move_all(again)
    finally:
        again.close()


def test_concurrent_readers_of_one_file_share_one_read(store: Store) -> None:
    for number in range(40):
        put(store, number)
        move_all(store)
    name = address(next(n for n in range(40) if store.pin(address(n)) is None))
    futures = [future for _ in range(8) if (future := store.moves.load_later(name)) is not None]
    pins = [future.result() for future in futures]
    assert len({pin.entry for pin in pins if pin is not None}) == 1
    assert store.stats().tiers[-1].hits == 1
    for pin in pins:
        assert pin is not None
        pin.release()


def test_writers_of_rows_do_not_wait_for_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    is_stuck, is_free = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        is_stuck.set()
        is_free.wait(PATIENCE_S)

    monkeypatch.setattr(disk_module, "_move_piece", stuck)
    for number in range(16):  # the host is full
        put(store, number)
    moving = threading.Thread(target=store.moves.move_once)
    moving.start()
    assert is_stuck.wait(PATIENCE_S)
    for number in range(16, 60):
        put(store, number)
    assert moving.is_alive(), "the disk is still stuck"
    is_free.set()
    moving.join()


def test_what_is_hardly_used_again_is_not_written_but_sampled(store: Store, folder: Path) -> None:
    put(store, 0)
    (share,) = store.host.order.shares.values()
    for reuse in share.classes:
        reuse.chance = WRITE_CHANCE / 3
    for number in range(1, 8 * SAMPLED):
        put(store, number)
        move_all(store)
    written = store.stats().tiers[-1].writes
    assert 1 <= written <= 8 * SAMPLED / SAMPLED
    for number in range(8 * SAMPLED):
        if address(number).hex() in {path.name[:64] for path in files(folder)}:
            before = share.classes[0].chance
            loaded(store, number)
            assert share.classes[0].chance > before, (
                "a use after the disk shows that their like are used again"
            )
            break


def test_an_operator_drops_rows_from_the_disk_too(store: Store, folder: Path) -> None:
    for number in range(40):
        put(store, number)
        move_all(store)
    name = next(address(n) for n in range(40) if store.pin(address(n)) is None)
    assert store.evict(name)
    assert not store.contains(name)
    assert store.flush() == 39
    assert (files(folder), store.grids()) == ([], {})
