"""Images that requests name by path: SGLang's offline engine reads those of `image_folder`, and no others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.answers import Part
from testing.engine_flags import CHUNK_TOKENS, SGLANG_VARIABLES
from testing.sglang_engine import IMAGE, answer_from
from tests.engines.answers import PROMPTS, Own, assert_equal
from tests.sglang.conftest import HANG_S, variables
from tests.vllm.restartable import Restartable

PROGRAM = """
import json, sys
import sglang

def main():
    text, paths, options = json.loads(sys.argv[1])
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    engine = sglang.Engine(**options)
    for path in paths:
        try:
            answer = engine.generate(text, sampling, image_data=path, return_logprob=True, top_logprobs_num=5)
            print("ANSWER", json.dumps(answer["meta_info"]))
        except ValueError as error:
            print("REFUSED", error)
    engine.shutdown()

if __name__ == "__main__":  # its processes import this module
    main()
"""
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "random_seed": 0,
    "attention_backend": "torch_native",
    "mm_attention_backend": "sdpa",
    "disable_cuda_graph": True,
    "chunked_prefill_size": CHUNK_TOKENS,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
}
NAME = "one png"


@pytest.mark.story("image files of an allowed folder")
@pytest.mark.story("the engine as a class of Python")
def test_the_offline_engine_reads_the_files_of_the_folder_and_no_others(
    checkpoint: Path, service: Restartable, own: Own, tmp_path: Path
) -> None:
    folder, program = tmp_path / "images", tmp_path / "program.py"
    folder.mkdir()
    program.write_text(PROGRAM)
    image, question = PROMPTS[NAME]
    inside, outside, leading_out = folder / "one.png", tmp_path / "two.png", folder / "link.png"
    for file in (inside, outside):
        file.write_bytes(_bytes(image))
    leading_out.symlink_to(outside)
    paths = [str(inside), f"file://{inside}", "one.png", str(outside), "../two.png", str(leading_out)]
    text = f"<|im_start|>user\n{IMAGE}{question!s}<|im_end|>\n<|im_start|>assistant\n"
    arguments = json.dumps([text, paths, {"model_path": str(checkpoint), **OPTIONS}])
    environment = {**os.environ, **SGLANG_VARIABLES, **variables(service.endpoint, image_folder=str(folder))}
    encoded = service.encodes()
    ran = subprocess.run(
        [sys.executable, program, arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S / 2,
    )
    lines = [line.partition(" ") for line in ran.stdout.splitlines()]
    answers = [answer_from(json.loads(said)) for kind, _, said in lines if kind == "ANSWER"]
    refused = [said for kind, _, said in lines if kind == "REFUSED"]
    assert (len(answers), len(refused)) == (3, 3), ran.stdout + ran.stderr
    for answer in answers:
        assert_equal(answer, own(PROMPTS[NAME]))
    assert [each.partition(" is ")[2] for each in refused] == ["not in the folder of image_folder"] * 3
    assert service.encodes() <= encoded + 1, "the engine's own tower has encoded none of them"
    assert "own tower encodes" not in ran.stderr


def _bytes(part: Part) -> bytes:
    assert isinstance(part, bytes)
    return part
