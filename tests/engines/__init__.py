"""Tests that tests/vllm and tests/sglang both import: a story is told once, for the engine of each file."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.answers")
