"""Mistakes in `.env`: `up --wait` fails, and the last lines of the log say why."""

import shutil
import socket
from pathlib import Path

import pytest

from testing.images.stack import Stack, failure_of

pytestmark = pytest.mark.images

ENCODER = ("redis", "encoder-cpu")


def test_a_store_beyond_the_shared_memory(
    images: dict[str, str], readable_checkpoint: Path, tmp_path: Path
) -> None:
    stack = Stack(readable_checkpoint, tmp_path, 1, STORE_HOST_GIB="2")
    said = failure_of(stack, ENCODER)
    assert "store" in said
    assert "/dev/shm" in said


def test_a_model_that_the_service_may_not_read(
    images: dict[str, str], readable_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(readable_checkpoint, tmp_path / "model")
    for path in (tmp_path / "model").iterdir():
        path.chmod(0o600)
    said = failure_of(Stack(tmp_path / "model", tmp_path, 1), ENCODER)
    assert "Permission denied" in said or "permission" in said
    assert "/model" in said


def test_a_redis_that_refuses(images: dict[str, str], readable_checkpoint: Path, tmp_path: Path) -> None:
    guarded = tmp_path / "guarded.yml"
    guarded.write_text(
        "services:\n  redis:\n    command: [redis-server, --requirepass, secret]\n"
        "    healthcheck: {test: [CMD, redis-cli, -a, secret, ping]}\n"
    )
    said = failure_of(Stack(readable_checkpoint, tmp_path, 1, guarded), ENCODER)
    assert "unhealthy" in said
    assert "Authentication required" in said


def test_a_port_that_is_taken(images: dict[str, str], readable_checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = failure_of(Stack(readable_checkpoint, tmp_path, 1, ENCODER_PORT=port), ENCODER)
    assert port in said
    assert "already" in said or "in use" in said
