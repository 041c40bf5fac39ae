"""The built images: what they are, how large they are, and whom they run as."""

import json
import subprocess

import pytest

from encoder_contract.version import __version__
from testing.images import build, engine

pytestmark = pytest.mark.images

PROGRAMS = {
    "encoder": "encoder-service",
    "prefill": "prefill-reference",
    "sglang-gateway": "encoder-sglang-gateway",
}
MOST_MB = 1400
MOST_MB_OF_AN_UPDATE = 20


@pytest.mark.parametrize("target", PROGRAMS)
def test_an_image_starts_without_rights_and_lists_its_packages(images: dict[str, str], target: str) -> None:
    bare = ["run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]
    said = engine.run(*bare, images[target], "--version")
    assert said.split() == [PROGRAMS[target], __version__]
    assert engine.run(*bare, "--entrypoint", "id", images[target], "-u").strip() == "10001"
    bom = json.loads(engine.run(*bare, "--entrypoint", "cat", images[target], "/opt/bom.json"))
    names = {each["name"] for each in bom["components"]}
    assert {"encoder-service", "grpcio"} <= names
    assert ("torch" in names) == (target != "sglang-gateway")
    assert not [name for name in names if name.startswith("nvidia-")], "nothing for GPUs in an image for CPUs"


def test_the_image_for_cuda_starts_and_has_what_a_gpu_needs(images: dict[str, str]) -> None:
    build.build_cuda()
    print(f"{build.CUDA}: {build.size_mb(build.CUDA):,.0f} MB")
    bare = ["run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]
    assert engine.run(*bare, build.CUDA, "--version").split() == ["encoder-service", __version__]
    program = "import shutil, torch, nvidia.dali; print(torch.version.cuda, shutil.which('gcc'))"
    said = engine.run(*bare, "--tmpfs", "/tmp", "--entrypoint", "python", build.CUDA, "-c", program)
    assert said.split() == ["13.0", "/usr/bin/gcc"]
    bom = json.loads(engine.run(*bare, "--entrypoint", "cat", build.CUDA, "/opt/bom.json"))
    assert {"torch", "nvidia-dali-cuda130", "fa3_fwd"} <= {each["name"] for each in bom["components"]}


def test_an_update_of_our_code_moves_one_small_layer(images: dict[str, str]) -> None:
    for image in images.values():
        (ours,) = [size for size, by in build.layers_mb(image) if "/opt/app /opt/app" in by]
        print(f"{image}: {build.size_mb(image):,.0f} MB, of which our code {ours:.1f} MB")
        assert ours < MOST_MB_OF_AN_UPDATE
    assert build.size_mb(images["encoder"]) < MOST_MB


def test_prometheus_accepts_configuration_and_rules_and_plays_their_cases(images: dict[str, str]) -> None:
    prometheus = build.bases()["prometheus"]
    tool = ["run", "--rm", "--entrypoint", "promtool", "--volume", f"{build.DEPLOY}/prometheus:/files:ro"]
    tool += ["--workdir", "/files", prometheus]
    engine.run(*tool, "check", "config", "prometheus.yml", "vllm.yml")
    engine.run(*tool, "test", "rules", "rules.test.yml")


def test_a_broken_case_of_an_alert_is_detected(images: dict[str, str]) -> None:
    text = (build.DEPLOY / "prometheus/rules.test.yml").read_text()
    assert "is 75% full" in text
    broken = text.replace("is 75% full", "is 76% full")
    shell = "cp -r /files /tmp/p && cd /tmp/p && cat > rules.test.yml && promtool test rules rules.test.yml"
    command = ["run", "--rm", "--interactive", "--entrypoint", "sh"]
    command += ["--volume", f"{build.DEPLOY}/prometheus:/files:ro"]
    done = subprocess.run(
        [engine.docker(), *command, build.bases()["prometheus"], "-c", shell],
        env=engine.environment(),
        input=broken,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr
