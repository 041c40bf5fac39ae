"""The table of errors: every arithmetic beside float32, the worst row told, and the bar that FP8 has to keep."""

from pathlib import Path

import pytest
import torch

from bench.precision import BFLOAT16, FP8, FP8_COSINE, compared, comparison
from testing.checkpoints import write_checkpoint

pytestmark = pytest.mark.slow


def test_fp8_stands_beside_bfloat16_of_both_with_its_worst_row_and_the_bar(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, depth=6, dtype=torch.bfloat16)
    rows = compared("qwen3_vl", folder)
    assert [row["arithmetic"] for row in rows] == ["`transformers`, bfloat16", BFLOAT16, FP8]
    assert all(row["worst_cosine"] <= row["mean_cosine"] <= 1 for row in rows)
    fp8 = rows[-1]
    assert FP8_COSINE <= fp8["mean_cosine"] < min(row["mean_cosine"] for row in rows[:-1])
    page = comparison({"rows": rows})
    assert f"| Qwen3-VL | ours, FP8 | {fp8['mean_cosine']:.5f} | {fp8['worst_cosine']:.5f} |" in page
    assert page.endswith("at least 0.998: kept.")
    fp8["mean_cosine"] = 0.9979
    assert comparison({"rows": rows}).endswith("at least 0.998: **missed**.")
