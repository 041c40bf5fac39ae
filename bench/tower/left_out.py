"""What an engine of vLLM saves without a tower: the memory of one with Qwen3-VL-8B's, and of one that leaves it out.

Two engines, each a process of its own, in bfloat16 on the CPU, with vLLM's dummy weights. The language model has the
right width and one layer: what differs is the tower. `.venv-vllm/bin/python -m bench.tower.left_out`
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from testing.checkpoints import write_checkpoint
from testing.vllm_environment import ENVIRONMENT

VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
TEXT = {"hidden_size": 4096, "num_hidden_layers": 1}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--images", type=int, help="in this process, an engine for so many images; none: no tower"
    )
    images = parser.parse_args().images
    if images is not None:
        sys.stdout.write(f"{_resident_gb(images)}\n")
        return
    tower_gb, without_gb = _in_a_process(1), _in_a_process(0)
    told = {"with_gb": tower_gb, "without_gb": without_gb, "saved_gb": round(tower_gb - without_gb, 2)}
    sys.stdout.write(json.dumps(told) + "\n")


def _in_a_process(images: int) -> float:
    command = [sys.executable, "-m", "bench.tower.left_out", "--images", str(images)]
    environment = {**os.environ, **ENVIRONMENT}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(ran.stdout.splitlines()[-1])


def _resident_gb(images: int) -> float:
    """Return the memory of this process with an engine in it, in GB."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = _without_weights(Path(folder))
        llm = LLM(
            str(model), load_format="dummy", dtype="bfloat16", enforce_eager=True, max_model_len=1024,
            limit_mm_per_prompt={"image": images, "video": 0}, skip_mm_profiling=True,
        )  # fmt: skip
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        llm.llm_engine.engine_core.shutdown()
    return round(pages * resource.getpagesize() / 1e9, 2)


def _without_weights(folder: Path) -> Path:
    """Write a checkpoint's settings alone, with the sizes of the published model."""
    model = write_checkpoint(folder)
    settings = json.loads((model / "config.json").read_text())
    settings["vision_config"] |= VISION
    settings["text_config"] |= TEXT
    (model / "config.json").write_text(json.dumps(settings))
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    return model


if __name__ == "__main__":
    main()
