"""Bytes on their way in: bounded per image and over all callers."""

import pytest

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.uploads import Upload, UploadBudget


def test_pieces_are_joined_in_order_and_then_no_longer_counted() -> None:
    budget = UploadBudget(100)
    upload = Upload(budget, 50)
    for piece in (b"one ", b"two ", b"three"):
        upload.add(piece)
    assert budget.held_bytes == 13
    assert upload.take() == b"one two three"
    assert budget.held_bytes == 0


def test_a_piece_over_a_bound_is_refused_before_it_is_kept() -> None:
    budget = UploadBudget(60)
    first, second = Upload(budget, 50), Upload(budget, 50)
    first.add(bytes(40))
    with pytest.raises(ImageLimitError, match="max_image_bytes"):
        first.add(bytes(11))
    with pytest.raises(OverloadedError) as caught:
        second.add(bytes(30))
    assert caught.value.retry_after_ms > 0
    assert budget.held_bytes == 40
    first.discard()
    first.discard()
    assert budget.held_bytes == 0
