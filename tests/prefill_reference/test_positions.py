"""M-RoPE positions of the reference engine against `transformers`' own."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.geometry import Grid
from prefill_client import expand_prompt
from prefill_reference.positions import mrope_positions

IMAGE = 7
MERGE = 2
GRIDS = st.builds(lambda h, w: Grid(1, 2 * h, 2 * w), st.integers(1, 9), st.integers(1, 9))
ROPE_INDEX = {
    "qwen3_vl": (transformers.Qwen3VLConfig, "Qwen3VLModel"),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, "Qwen2_5_VLModel"),
    "qwen3_5": (transformers.Qwen3_5Config, "Qwen3_5Model"),
}


@pytest.mark.parametrize("model_type", ROPE_INDEX)
def test_positions_equal_those_of_transformers(model_type: str) -> None:
    config, model_class = ROPE_INDEX[model_type]
    model = getattr(transformers, model_class).__new__(getattr(transformers, model_class))
    torch.nn.Module.__init__(model)
    model.config = config()

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.lists(GRIDS, min_size=1, max_size=5))
    def compare(data: st.DataObject, grids: list[Grid]) -> None:
        prompt = [1] * data.draw(st.integers(0, 5))
        for _ in grids:
            # transformers merges images that touch; real templates always put text between them
            prompt += [IMAGE] + [1] * data.draw(st.integers(1, 5))
        layout = expand_prompt(prompt, IMAGE, [g.patches // MERGE**2 for g in grids])
        ids = torch.tensor(layout.token_ids)[None]
        expected, delta = model.get_rope_index(
            ids, (ids == IMAGE).int(), image_grid_thw=torch.tensor([list(g) for g in grids])
        )
        computed = mrope_positions(layout, grids, MERGE)
        assert computed.tolist() == expected[:, 0].tolist()
        assert int(computed.max()) + 1 == layout.tokens + int(delta)

    compare()
