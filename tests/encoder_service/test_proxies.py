"""Calls through a real HAProxy and a real nginx: no attempt fails, refusals arrive, and limits on bodies are named."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.errors import ForbiddenError, ImageLimitError, InternalError, ModelMismatchError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient
from testing.hostile_images import with_trailer
from testing.photos import photo
from testing.processes import free_port
from tests.calls import encoded
from tests.operator_view import numbers, settled
from tests.servers import server_of
from tests.tenants import RIGHTS, TOKENS, guarded_by, table, with_token
from tests.waiting import soon

HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
listen encoder
  bind 127.0.0.1:{port} proto h2
  server one {to} proto h2
"""
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  grpc_read_timeout 1h; grpc_send_timeout 1h; client_body_timeout 1h;
  server {{ listen 127.0.0.1:{port} http2; {more} location / {{ grpc_pass grpc://{to}; }} }}
}}
"""
needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
MIB = 1 << 20
CALLS = 40


@asynccontextmanager
async def behind(
    program: str, text: str, folder: Path, server: Server, more: str = "", **options: Any
) -> AsyncIterator[EncoderClient]:
    """Run a proxy of the server; yield a client of it."""
    port = free_port()
    file = folder / f"{program}.conf"
    file.write_text(text.format(port=port, to=server.endpoint, folder=folder, more=more))
    flag = {"haproxy": ["-db", "-f"], "nginx": ["-c"]}[program]
    with subprocess.Popen([program, *flag, str(file)], stdin=subprocess.DEVNULL) as process:
        try:
            await soon(lambda: _listens(port))
            async with await EncoderClient.connect(f"127.0.0.1:{port}", **options) as client:
                yield client
        finally:
            process.kill()


async def _listens(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


def small(number: int) -> bytes:
    return with_trailer(photo(96, 64, 1, "PNG"), number)


def of_bytes(size: int, number: int) -> bytes:
    """Return an image file of `size` bytes: what follows the image does not matter."""
    file = photo(96, 64, 2, "PNG") + number.to_bytes(8, "big")
    return file + bytes(size - len(file))


async def submits(server: Server) -> dict[str, float]:
    """Return how many Submit calls have ended, by status."""
    found = await numbers(server)
    return {status: found.total("calls_total", call="submit", status=status) for status in STATUSES}


STATUSES = ("OK", "CANCELLED", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


@needs_haproxy
async def test_no_submit_fails_behind_haproxy(server: Server, tmp_path: Path) -> None:
    async with behind("haproxy", HAPROXY, tmp_path, server) as client:
        for number in range(CALLS):
            # The second is sent when it is asked for.
            for image in (small(number), of_bytes(MIB + 1, number)):
                await encoded(client, image)
            async with await client.keep([small(number)]) as kept:
                assert kept.error is None
            (answer,) = await client.submit([small(number)], all_or_nothing=True)
            assert answer.error is None
        await settled(server, "calls_total", 4 * CALLS, call="submit", status="OK")  # no attempt failed
        assert sum((await submits(server)).values()) == 4 * CALLS


@needs_haproxy
async def test_a_refused_submit_has_its_error_behind_haproxy(server: Server, tmp_path: Path) -> None:
    async with behind("haproxy", HAPROXY, tmp_path, server) as client:
        client.description = replace(client.description, model_fingerprint=bytes(32))
        for number in range(CALLS):
            (answer,) = await client.submit([small(number)])
            assert isinstance(answer.error, ModelMismatchError)
        await settled(server, "calls_total", CALLS, call="submit", status="FAILED_PRECONDITION")


@needs_haproxy
async def test_a_submit_that_is_not_admitted_has_its_error_behind_haproxy(
    config: Config, model: Model, tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(table("reader", TOKENS["reader"], rights=RIGHTS["reader"]))
    async with (
        server_of(guarded_by(tenants, config), model) as guard,
        behind(
            "haproxy", HAPROXY, tmp_path, guard, credentials=with_token(tmp_path, TOKENS["reader"])
        ) as client,
    ):
        for number in range(CALLS):
            (answer,) = await client.submit([small(number)])
            assert isinstance(answer.error, ForbiddenError)


@needs_nginx
async def test_a_limit_of_nginx_on_bodies_is_named_and_hardly_retried(server: Server, tmp_path: Path) -> None:
    async with behind("nginx", NGINX, tmp_path, server, "client_max_body_size 500k;") as client:
        (along,) = await client.submit([of_bytes(MIB - 1024, 1)])  # comes with its name: HTTP 413
        assert isinstance(along.error, ImageLimitError)
        (asked,) = await client.submit(
            [of_bytes(4 * MIB, 2)]
        )  # nginx has begun the answer: it can only reset
        assert isinstance(asked.error, InternalError)
        for error in (along.error, asked.error):
            assert "client_max_body_size" in error.message
        assert sum((await submits(server)).values()) <= 3  # one attempt, and one retry


@needs_nginx
async def test_large_files_arrive_behind_an_nginx_without_this_limit(server: Server, tmp_path: Path) -> None:
    async with behind("nginx", NGINX, tmp_path, server, "client_max_body_size 0;") as client:
        for answer in await client.submit([of_bytes(size, size) for size in (MIB - 1024, 4 * MIB)]):
            assert answer.error is None
