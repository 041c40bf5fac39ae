"""The families that the gateway serves and refuses, against the list in the code of each supported release."""

import ast
import re
import zipfile
from collections.abc import Callable

import pytest

from prefill_client.sglang_gateway.frames import SUPPORTED
from prefill_client.sglang_gateway.model_check import _REFUSED, SERVED
from testing.families import CHECKPOINTS

LIST = "sglang/srt/arg_groups/pd_disaggregation_hook.py"


def accepted(wheel: zipfile.ZipFile) -> set[str]:
    """The models that a release accepts with `--language-only`, by its check: in lower case, without underscores."""
    (listed,) = (
        ast.literal_eval(test.comparators[0])
        for test in ast.walk(ast.parse(wheel.read(LIST)))
        if isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and (test.left.id, type(test.ops[0])) == ("model_arch", ast.NotIn)
    )
    return {plain(architecture.partition("For")[0]) for architecture in listed}


def plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@pytest.mark.story("models of `transformers`")
@pytest.mark.parametrize("release", SUPPORTED)
def test_a_release_accepts_the_families_that_are_served_and_refuses_the_others(
    wheels: Callable[[str], zipfile.ZipFile], release: str
) -> None:
    with wheels(release) as wheel:
        names = accepted(wheel)
    assert {plain(model_type) for model_type in SERVED} <= names
    others = {*CHECKPOINTS} - {*SERVED, *_REFUSED}
    assert len(others) > 5
    assert not {plain(model_type) for model_type in others} & names
    assert {plain("kimi_k25"), plain("glm5_next")} <= names
