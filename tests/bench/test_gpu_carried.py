"""What is carried to a GPU machine: a library without the code for other GPUs."""

import struct
from pathlib import Path

import pytest

from bench.gpu_carried.__main__ import DALI, DALI_NEEDS, PACKAGES, PIECE_BYTES, command, split
from bench.gpu_carried.fatbin import prune, section_of

PTX, CUBIN = 1, 2


def entry(kind: int, capability: int, code: bytes) -> bytes:
    """Return an entry of a container of GPU code."""
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0")
    return (header + struct.pack("<I", capability)).ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def library(path: Path, fatbin: bytes) -> Path:
    """Write an ELF file with one section of GPU code."""
    names = b"\0.nv_fatbin\0.names\0".ljust(24, b"\0")
    begin = 64
    table = begin + len(fatbin) + len(names)
    headers = [
        struct.pack("<IIQQQQ", 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQ", 1, 1, 0, 0, begin, len(fatbin)),
        struct.pack("<IIQQQQ", 12, 3, 0, 0, begin + len(fatbin), len(names)),
    ]
    head = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", head, 40, table)
    struct.pack_into("<HHH", head, 58, 64, len(headers), 2)
    path.write_bytes(bytes(head) + fatbin + names + b"".join(each.ljust(64, b"\0") for each in headers))
    return path


def test_only_the_code_for_the_machines_gpu_is_left(tmp_path: Path) -> None:
    kept, dropped = b"hopper" * 8, b"ampere" * 8
    code = container(entry(CUBIN, 80, dropped), entry(CUBIN, 90, kept), entry(PTX, 90, dropped))
    only_ptx = container(entry(PTX, 70, b"compiled at run time"))
    path = library(tmp_path / "libdali.so", code + bytes(8) + only_ptx)
    size = path.stat().st_size
    assert prune(path, [90]) == 2 * len(dropped)
    content = path.read_bytes()
    assert len(content) == size
    assert kept in content
    assert dropped not in content
    assert b"compiled at run time" in content


def test_a_library_without_gpu_code_stays_and_another_file_is_refused(tmp_path: Path) -> None:
    path = library(tmp_path / "plain.so", b"")
    assert section_of(path.read_bytes(), ".nv_fatbin") == (64, 64)
    assert prune(path, [90]) == 0
    path.write_bytes(b"not ELF")
    with pytest.raises(ValueError, match="no 64-bit little-endian ELF file"):
        prune(path, [90])


def test_dali_is_split_in_two_pieces_and_more_are_refused(tmp_path: Path) -> None:
    split(bytes(2 * PIECE_BYTES), tmp_path)
    assert [path.stat().st_size for path in sorted(tmp_path.glob("[23]/dali.xz.*"))] == [PIECE_BYTES] * 2
    with pytest.raises(ValueError, match="more than two pieces"):
        split(bytes(2 * PIECE_BYTES + 1), tmp_path)


def test_wheels_are_downloaded_for_the_other_machine_without_their_dependencies() -> None:
    for package in (*PACKAGES, DALI, *DALI_NEEDS):
        words = command(package, Path("folder"))
        assert words[-1] == package
        assert {"--no-deps", "--only-binary=:all:", "manylinux_2_28_x86_64"} <= set(words)
