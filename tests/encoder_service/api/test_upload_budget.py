"""Uploads: space is reserved before bytes are sent, bounded per image, call, caller and server."""

import pytest

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.api.submit import MIN_BYTES_PER_S, Uploads
from encoder_service.limits import Budget
from tests.callers import caller


def budget_of(size_bytes: int) -> Budget:
    return Budget(size_bytes, "uploads")


def uploads(budget: Budget, holder: str = "someone", max_image_bytes: int = 50) -> Uploads:
    hold = budget.hold(caller(holder), 0)
    return Uploads(hold, max_image_bytes=max_image_bytes, max_video_bytes=0, message_bytes=0, idle_s=10)


def test_pieces_are_joined_in_order_and_their_space_is_released() -> None:
    budget = budget_of(1000)
    call = uploads(budget)
    call.reserve(1, 13)
    for piece in (b"one ", b"two ", b"three"):
        call.add(1, piece)
    upload = call.of(1)
    assert (upload.joined(), upload.size, budget.held) == (b"one two three", 13, 13)
    call.release(1)
    assert budget.held == 0


def test_a_call_reserves_space_only_for_its_incomplete_uploads() -> None:
    budget = budget_of(1000)
    call = uploads(budget)
    for index, size in enumerate((10, 50, 20)):
        call.reserve(index, size)
    assert budget.held == 50
    call.add(0, bytes(10))
    call.release(1)
    assert budget.held == 20
    call.add(2, bytes(15))
    assert budget.held == 25, "pieces of two images are held"
    call.release(0)
    call.release(2)
    assert budget.held == 0


def test_an_unknown_size_reserves_the_largest_size() -> None:
    budget = budget_of(100)
    uploads(budget, "a").reserve(1, 0)
    assert budget.held == 50
    tiny = budget_of(30)
    uploads(tiny, "a").reserve(1, 0)
    assert tiny.held == 30


def test_uploads_over_a_limit_are_refused_before_they_are_stored() -> None:
    budget = budget_of(100)
    first, second = uploads(budget, "a"), uploads(budget, "b")
    with pytest.raises(ImageLimitError, match="max_image_bytes"):
        first.reserve(1, 51)
    first.reserve(1, 40)
    first.add(1, bytes(40))
    with pytest.raises(ImageLimitError, match="size_bytes"):
        first.add(1, b"x")
    first.reserve(2, 50)
    with pytest.raises(ImageLimitError, match="one after another"):
        first.add(2, bytes(11))
    assert budget.held == 50
    second.reserve(1, 50)
    with pytest.raises(OverloadedError) as caught:
        uploads(budget, "c").reserve(1, 1)
    assert caught.value.retry_after_ms > 0
    assert budget.held == 100


def test_all_calls_of_a_host_leave_upload_space_for_others() -> None:
    budget = budget_of(1000)
    for _ in range(15):
        uploads(budget, "host h").reserve(1, 50)
    with pytest.raises(OverloadedError, match="share"):
        uploads(budget, "host h").reserve(1, 50)
    uploads(budget, "host other").reserve(1, 50)


@pytest.mark.attack("an upload that sends a byte from time to time")
def test_slow_uploads_time_out_and_fast_ones_continue() -> None:
    budget = budget_of(10_000_000)
    call = uploads(budget, max_image_bytes=10_000_000)
    call.reserve(1, 0)
    for _ in range(20):
        call.idle_left_s -= 1.0
        call.add(1, bytes(2 * MIN_BYTES_PER_S))
    assert call.idle_left_s == 10
    for _ in range(11):
        call.idle_left_s -= 1.0
        call.add(1, b"x")
    assert call.idle_left_s < 0


def test_a_call_sends_one_video_at_a_time_within_the_video_limit() -> None:
    budget = budget_of(1000)
    hold = budget.hold(caller("someone"), 0)
    call = Uploads(hold, max_image_bytes=50, max_video_bytes=200, message_bytes=0, idle_s=10)
    with pytest.raises(ImageLimitError, match="max_video_bytes = 200"):
        call.reserve(0, 201, is_video=True)
    for index in (1, 2):
        call.reserve(index, 150, is_video=True)
    call.add(1, bytes(100))
    with pytest.raises(ImageLimitError, match="one after another"):
        call.add(2, bytes(1))
    call.add(1, bytes(50))
    video = call.of(1).video
    assert video is not None
    assert video.size == 150
    call.release(1)
    call.add(2, bytes(150))
    with pytest.raises(ImageLimitError, match="size_bytes of its name"):
        call.add(2, bytes(1))


def test_files_in_a_message_take_space_until_it_is_answered() -> None:
    budget = budget_of(100)
    call, other = uploads(budget, "a"), uploads(budget, "b")
    call.admit(60)
    with pytest.raises(OverloadedError):
        other.admit(41)
    assert budget.held == 60
    call.reserve(1, 20)
    call.add(1, bytes(20))
    call.release(1)
    call.reserve(2, 30)
    call.settle()
    assert budget.held == 30, "only the space of the incomplete file"
    other.admit(41)
    assert budget.held == 71
