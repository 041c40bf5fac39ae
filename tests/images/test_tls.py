"""The compose file with deploy/tls.yml: certificates, tenants and the fleet's key on every connection."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing.images import build, engine
from testing.images.stack import PROJECT, Stack, wait_until
from testing.photos import photo

pytestmark = pytest.mark.images


def test_a_stack_with_tls_serves_its_tenants_only_and_rolls(
    images: dict[str, str], readable_checkpoint: Path, tmp_path: Path
) -> None:
    credentials = tmp_path / "credentials"
    command = [sys.executable, "-m", "testing.certificates", credentials, "--group", "10001"]
    subprocess.run(command, check=True, cwd=build.ROOT, stdout=subprocess.DEVNULL)
    stack = Stack(readable_checkpoint, tmp_path, 2, build.DEPLOY / "tls.yml", CREDENTIALS=str(credentials))
    try:
        stack.up(replicas=2)
        stack.chat(photo(320, 240, 1))
        wait_until(
            lambda: stack.value('sum(up{job="encoder"})') == 2, "Prometheus scrapes both with its token"
        )
        wait_until(lambda: stack.value("min(encsvc_index_peers)") == 1, "replicas see each other")
        plain = [
            "run",
            "--rm",
            "--network",
            f"{PROJECT}_default",
            "--entrypoint",
            "python",
            images["prefill"],
        ]
        code = "import urllib.request as r; r.urlopen('http://encoder:9464/metrics', timeout=10)"
        with pytest.raises(subprocess.CalledProcessError):
            engine.run(*plain, "-c", code)
        anyone = "context=ssl._create_unverified_context()"
        code = f"import ssl, urllib.request as r; r.urlopen('https://encoder:9464/metrics', timeout=10, {anyone})"
        with pytest.raises(subprocess.CalledProcessError) as refused:
            engine.run(*plain, "-c", code)
        assert "401" in refused.value.stderr
        before = set(stack.containers("encoder-cpu"))
        with ThreadPoolExecutor(1) as pool:
            rolling = pool.submit(stack.roll, "encoder-cpu")
            chats = 0
            while not rolling.done():
                stack.chat(photo(320, 240, 100 + chats))
                chats += 1
            rolling.result()
        print(f"roll of 2 replicas with TLS: {chats} chats, none failed")
        assert chats
        after = set(stack.containers("encoder-cpu"))
        assert len(after) == 2
        assert not before & after
    finally:
        stack.down()
