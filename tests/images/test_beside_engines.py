"""The compose files for engines, with the encoder on the CPU and a client beside it that reads rows in place."""

import subprocess
from pathlib import Path

import pytest

from testing.images import build, engine
from testing.images.stack import wait_until
from testing.photos import photo

pytestmark = pytest.mark.images

ON_THE_CPU = """
  encoder:
    image: IMAGE
    deploy: !reset null
    ulimits: !reset null
    environment: {ENCSVC_DEVICES: cpu, ENCSVC_DTYPE: auto, ENCSVC_STORE_HOST_GIB: "0.25", OMP_NUM_THREADS: "1"}
"""
# Which service holds the memory, and what its image is on the CPU.
HOLDERS = {"vllm": ("namespaces", "  namespaces: {image: IMAGE}\n"), "sglang": ("encoder", "")}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_neighbour_of_the_encoder_reads_rows_in_place(
    images: dict[str, str], readable_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(320, 240, 1))
    holder, services = HOLDERS[name]
    override = tmp_path / "cpu.yml"
    override.write_text(f"services:\n{services}{ON_THE_CPU}".replace("IMAGE", images["encoder"]))
    settings = {"MODEL": str(readable_checkpoint), "SERVED_NAME": "chat", "GRAFANA_PASSWORD": "of this test"}
    settings |= {"SHM_SIZE": "384m", "ENCODER_MEMORY": "3g"}

    def compose(*arguments: str) -> str:
        files = ("-f", str(build.DEPLOY / name / "docker-compose.yml"), "-f", str(override))
        return engine.run("compose", *files, *arguments, more=settings)

    def encoded() -> str:
        namespaces = compose("ps", "--quiet", holder).strip()
        client = ["run", "--rm", "--user", "10001:10001", "--network", "none"]
        client += ["--ipc", f"container:{namespaces}"]
        client += ["--volume", f"encoder-service-{name}_socket:/run/encoder"]
        client += ["--volume", f"{tmp_path}:/photos:ro"]
        client += ["--entrypoint", "prefill-client", images["encoder"]]
        return engine.run(*client, "encode", "/photos/photo.jpg", "--server", "unix:/run/encoder/socket")

    def health(container: str) -> str:
        return engine.run("inspect", "--format", "{{.State.Health.Status}}", container).strip()

    tmp_path.chmod(0o755)
    try:
        compose("up", "--detach", "--wait", "--no-build", "encoder")
        assert "by shm" in encoded()
        container = compose("ps", "--quiet", "encoder").strip()
        pid = engine.run("inspect", "--format", "{{.State.Pid}}", container).strip()
        subprocess.run(["kill", "-9", pid], check=True)
        wait_until(lambda: health(container) != "healthy", "the death is noticed")
        wait_until(lambda: health(container) == "healthy", "the encoder is restarted")
        assert "by shm" in encoded()
    finally:
        compose("down", "--volumes")
