"""Bytes on their way in: room before they travel, bounded per image, per call, per caller and over all."""

import pytest

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.api.submit import MIN_BYTES_PER_S, Uploads
from encoder_service.limits import Budget
from tests.callers import caller


def room_of(size_bytes: int) -> Budget:
    return Budget(size_bytes, "uploads", per_host=True)


def uploads(room: Budget, *holders: str, max_image_bytes: int = 50) -> Uploads:
    held = room.hold(caller(*holders or ("someone",)), 0)
    return Uploads(held, max_image_bytes=max_image_bytes, max_video_bytes=0, idle_s=10)


def test_pieces_are_joined_in_order_and_then_no_longer_counted() -> None:
    room = room_of(1000)
    ours = uploads(room)
    ours.expect(1, 13)
    for piece in (b"one ", b"two ", b"three"):
        upload = ours.add(1, piece)
    assert (upload.joined(), upload.size, room.held) == (b"one two three", 13, 13)
    ours.drop(1)
    assert (ours.expected, room.held) == ([], 0)


def test_a_call_reserves_upload_space_for_what_it_still_needs() -> None:
    room = room_of(1000)
    ours = uploads(room)
    for index, size in enumerate((10, 50, 20)):
        ours.expect(index, size)
    assert room.held == 50
    ours.add(0, bytes(10))
    ours.drop(1)
    assert room.held == 20
    ours.add(2, bytes(15))
    assert room.held == 25, "pieces of two images are held"
    ours.drop(0)
    ours.drop(2)
    assert room.held == 0


def test_a_size_that_was_not_said_counts_as_the_largest() -> None:
    room = room_of(100)
    uploads(room, "a").expect(1, 0)
    assert room.held == 50
    tiny = room_of(30)
    uploads(tiny, "a").expect(1, 0)
    assert tiny.held == 30


def test_uploads_over_a_limit_are_refused_before_they_are_kept() -> None:
    room = room_of(100)
    first, second = uploads(room, "a"), uploads(room, "b")
    with pytest.raises(ImageLimitError, match="max_image_bytes"):
        first.expect(1, 51)
    first.expect(1, 40)
    first.add(1, bytes(40))
    with pytest.raises(ImageLimitError, match="size_bytes"):
        first.add(1, b"x")
    first.expect(2, 50)
    with pytest.raises(ImageLimitError, match="one after another"):
        first.add(2, bytes(11))
    assert room.held == 50
    second.expect(1, 50)
    with pytest.raises(OverloadedError) as caught:
        uploads(room, "c").expect(1, 1)
    assert caught.value.retry_after_ms > 0
    assert room.held == 100


def test_one_caller_or_host_leaves_upload_space_to_others() -> None:
    room = room_of(1000)
    for name in range(15):
        uploads(room, f"client {name}", "host h").expect(1, 50)
    with pytest.raises(OverloadedError, match="share"):
        uploads(room, "client 15", "host h").expect(1, 50)
    uploads(room, "client new", "host other").expect(1, 50)


def test_slow_uploads_end_and_fast_ones_continue() -> None:
    room = room_of(10_000_000)
    ours = uploads(room, max_image_bytes=10_000_000)
    ours.expect(1, 0)
    for _ in range(20):
        ours.patience_s -= 1.0
        ours.add(1, bytes(2 * MIN_BYTES_PER_S))
    assert ours.patience_s == 10
    for _ in range(11):
        ours.patience_s -= 1.0
        ours.add(1, b"x")
    assert ours.patience_s < 0


def test_a_call_sends_one_video_after_another_and_each_is_bounded_as_one() -> None:
    room = room_of(1000)
    held = room.hold(caller("someone"), 0)
    ours = Uploads(held, max_image_bytes=50, max_video_bytes=200, idle_s=10)
    with pytest.raises(ImageLimitError, match="max_video_bytes = 200"):
        ours.expect(0, 201, is_video=True)
    for index in (1, 2):
        ours.expect(index, 150, is_video=True)
    ours.add(1, bytes(100))
    with pytest.raises(ImageLimitError, match="one after another"):
        ours.add(2, bytes(1))
    upload = ours.add(1, bytes(50))
    assert upload.video is not None
    assert upload.video.size == 150
    ours.drop(1)
    ours.add(2, bytes(150))
    with pytest.raises(ImageLimitError, match="size_bytes of its name"):
        ours.add(2, bytes(1))
