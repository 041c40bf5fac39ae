"""The reference service as a process: it answers by HTTPS and authenticates to its encoder by a certificate."""

import asyncio
import json
import re
import signal
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from testing.certificates import HOSTS, Authority
from testing.photos import data_url, photo
from tests.waiting import soon


async def test_a_chat_uses_tls_end_to_end_and_reloads_certificates(
    config: Config, model: Model, checkpoint: Path, tmp_path: Path
) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "ca.pem")
    cert, key = authority.issue(tmp_path, "server", HOSTS)
    own_certificate = authority.issue(tmp_path, "prefill")
    encoder = Server(replace(config, tls_cert=cert, tls_key=key, tls_client_ca=ca), model)
    await encoder.start()
    command = [Path(sys.executable).with_name("prefill-client"), "serve", "--model", checkpoint]
    command += [
        "--encoder",
        encoder.endpoint,
        "--listen",
        "127.0.0.1:0",
        "--tls-cert",
        cert,
        "--tls-key",
        key,
    ]
    command += [
        "--encoder-tls-ca",
        ca,
        "--encoder-tls-cert",
        own_certificate.cert,
        "--encoder-tls-key",
        own_certificate.key,
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout
        found = None
        async for line in process.stdout:
            if found := re.match(rb"\s*listening\s+(\S+:\d+)$", line):
                break
        assert found
        url = f"https://{found[1].decode()}/v1/chat/completions"
        image = {"type": "image_url", "image_url": {"url": data_url(photo(300, 200, 1))}}

        def chat(by: str) -> bytes:
            body = {
                "model": checkpoint.name,
                "max_tokens": 2,
                "messages": [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}],
            }
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            context = ssl.create_default_context(cafile=by)
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                return bytes(answer.read())

        assert b"choices" in await asyncio.to_thread(chat, ca)  # at once: it has printed that it listens
        new = Authority("new")
        new_ca = new.write(tmp_path / "new-ca.pem")
        new.issue(tmp_path, "server", HOSTS)

        async def answers_with_the_new_one() -> bool:
            try:
                return b"choices" in await asyncio.to_thread(chat, new_ca)
            except urllib.error.URLError:
                return False

        await soon(answers_with_the_new_one)
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            await asyncio.to_thread(chat, ca)
    finally:
        process.send_signal(signal.SIGTERM)
        code = await process.wait()
        await encoder.drain()
    assert code == 0
