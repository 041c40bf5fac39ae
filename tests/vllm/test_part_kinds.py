"""The middleware takes each part of a message for what vLLM takes it for."""

import pytest

from prefill_client.vllm.parts import KNOWN_FIELDS
from tests.vllm import part_kinds


@pytest.mark.parametrize("seed", range(3))
def test_random_parts_are_what_vllms_own_parser_takes_them_for(seed: int) -> None:
    compared = part_kinds.disagreements(4000, seed)
    assert compared["kinds"] == ["image", "passed on", "refused", "video"]
    assert not compared["count"], compared["different"]


def test_the_fields_that_vllm_reads_itself_are_known() -> None:
    """It passes all others to the chat template."""
    assert KNOWN_FIELDS == part_kinds.KNOWN_FIELDS
