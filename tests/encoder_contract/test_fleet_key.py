"""The fleet's key: signatures cover every field and the purpose, and a secret can be replaced in steps."""

import itertools
from pathlib import Path

import pytest

from encoder_contract.fleet_key import FleetKey
from encoder_contract.geometry import Grid

OLD, NEW = b"an old secret of thirty-two bytes", b"a new secret of thirty-two bytes."
KEY = FleetKey([OLD])
ADDRESS, GRID, ROWS = b"a" * 32, Grid(1, 2, 4), bytes(range(64))
NOW_S = 1_790_000_000.0


def pieces(rows: bytes = ROWS, length: int = 10) -> list[memoryview]:
    return [memoryview(rows[begin : begin + length]) for begin in range(0, len(rows), length)]


def test_signed_rows_verify_in_any_pieces_and_only_unchanged() -> None:
    signature = KEY.sign_rows(ADDRESS, GRID, pieces())
    assert len(signature) == 32
    assert KEY.verify_rows(signature, ADDRESS, GRID, [memoryview(ROWS)])
    flipped = bytes([ROWS[0] ^ 1]) + ROWS[1:]
    for address, grid, rows in (
        (b"b" * 32, GRID, ROWS),
        (ADDRESS, Grid(1, 4, 2), ROWS),
        (ADDRESS, GRID, flipped),
        (ADDRESS, GRID, ROWS[:-1]),
    ):
        assert not KEY.verify_rows(signature, address, grid, [memoryview(rows)])
    for forged in (b"", signature[:-1], bytes(32), FleetKey([NEW]).sign_rows(ADDRESS, GRID, pieces())):
        assert not KEY.verify_rows(forged, ADDRESS, GRID, [memoryview(ROWS)])


def test_a_request_is_for_one_replica_and_for_one_purpose() -> None:
    signature = KEY.sign_request("10.0.0.5:50051", b"request", NOW_S)
    assert KEY.request_signed_at(signature, "10.0.0.5:50051", b"request") == NOW_S
    assert KEY.request_signed_at(signature, "10.0.0.6:50051", b"request") is None
    assert KEY.request_signed_at(signature, "10.0.0.5:5005", b"1request") is None
    assert KEY.request_signed_at(signature, "10.0.0.5:50051", b"another") is None
    assert KEY.sign_rows(b"10.0.0.5:50051", GRID, pieces(b"request")) not in signature


def test_the_time_of_a_request_cannot_be_changed() -> None:
    signature = KEY.sign_request("a:1", b"request", NOW_S)
    later = KEY.sign_request("a:1", b"request", NOW_S + 3600)
    assert KEY.request_signed_at(later[:8] + signature[8:], "a:1", b"request") is None
    for damaged in (b"", signature[:8], signature[:-1], signature[8:], signature + b"x"):
        assert KEY.request_signed_at(damaged, "a:1", b"request") is None


def test_replicas_accept_each_other_at_every_step_of_a_key_change() -> None:
    steps = [[OLD], [OLD, NEW], [NEW, OLD], [NEW]]
    for before, after in itertools.pairwise(steps):
        for one, other in ((before, after), (after, before)):
            signature = FleetKey(one).sign_rows(ADDRESS, GRID, pieces())
            assert FleetKey(other).verify_rows(signature, ADDRESS, GRID, [memoryview(ROWS)])
    signature = FleetKey([OLD]).sign_rows(ADDRESS, GRID, pieces())
    assert not FleetKey([NEW]).verify_rows(signature, ADDRESS, GRID, [memoryview(ROWS)])


def test_a_file_of_secrets_has_one_per_line_and_errors_hide_them(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(NEW + b"\r\n\n  " + OLD + b"\n")
    signature = FleetKey([NEW]).sign_request("a:1", b"", NOW_S)
    assert FleetKey.read(str(path)).request_signed_at(signature, "a:1", b"") == NOW_S
    assert FleetKey.read(str(path)).sign_request("a:1", b"", NOW_S) == signature
    for content in (b"", b"\n", b"hunter2\n", OLD + b"\nhunter2"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="32 characters") as refusal:
            FleetKey.read(str(path))
        assert str(path) in str(refusal.value)
        assert "hunter2" not in str(refusal.value)
    with pytest.raises(ValueError, match="No such file"):
        FleetKey.read(str(tmp_path / "nowhere"))
