"""Reading a Fetch: whatever way windows are cut and mixed, each is complete once, and only with its own bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.errors import InternalError
from encoder_contract.extents import Filling
from encoder_contract.framing import checksum
from encoder_contract.stream import RowReader, check_rows
from encoder_contract.v1 import encoder_pb2 as pb


class Window(Filling):
    """A window in memory of its own."""

    def __init__(self, ready: pb.ImageReady) -> None:
        self.bytes = bytearray(ready.row_bytes)
        super().__init__([memoryview(self.bytes)])


def announcement(index: int, rows: bytes, *, inside: bool = False) -> pb.ImageReady:
    return pb.ImageReady(
        index=index, row_bytes=len(rows), checksum=checksum([memoryview(rows)]), rows=rows if inside else b""
    )


@given(
    windows=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.booleans()), max_size=6),
    cut=st.integers(1, 9),
    draw=st.randoms(use_true_random=False),
)
def test_each_window_is_complete_once_with_its_own_bytes(windows, cut, draw):
    reader = RowReader(Window)
    ready = [announcement(index, rows, inside=inside) for index, (rows, inside) in enumerate(windows)]
    complete = reader.read(pb.FetchResponse(ready=ready))
    pieces = {
        index: [rows[begin : begin + cut] for begin in range(0, len(rows), cut)]
        for index, (rows, inside) in enumerate(windows)
        if not inside
    }
    while pieces:
        index = draw.choice(list(pieces))
        complete += reader.read((index, memoryview(pieces[index].pop(0))))
        if not pieces[index]:
            del pieces[index]
    assert {each.index: bytes(window.bytes) for each, window in complete} == {
        index: rows for index, (rows, _) in enumerate(windows)
    }
    assert len(complete) == len(windows)
    for each, window in complete:
        check_rows(each, window.checksum)


def test_damaged_rows_do_not_pass_their_check():
    ((ready, window),) = RowReader(Window).read(
        pb.FetchResponse(ready=[pb.ImageReady(row_bytes=4, rows=b"rows", checksum=1)])
    )
    with pytest.raises(InternalError, match="arrived damaged"):
        check_rows(ready, window.checksum)


def test_what_no_server_sends_is_an_error():
    reader = RowReader(Window)
    with pytest.raises(InternalError, match="window 3 arrived, which was not announced"):
        reader.read((3, memoryview(b"rows")))
    assert reader.read(pb.FetchResponse(ready=[announcement(3, b"rows")])) == []
    with pytest.raises(InternalError, match="window 3 was announced again"):
        reader.read(pb.FetchResponse(ready=[announcement(3, b"rows")]))
    with pytest.raises(InternalError, match="only 4 are missing"):
        reader.read((3, memoryview(b"rows!")))
    with pytest.raises(InternalError, match="only 3 are missing"):
        reader.read(pb.FetchResponse(ready=[pb.ImageReady(index=4, row_bytes=3, rows=b"rows")]))
