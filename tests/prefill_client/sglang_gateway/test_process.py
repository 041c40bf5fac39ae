"""The gateway as a process, with a service that starts, stops and fills up."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509

from prefill_client.sglang_gateway.registration import Registration
from testing.certificates import HOSTS, Authority
from testing.photos import data_url, photo
from testing.server_process import ServerProcess
from testing.sglang_gateway import GatewayProcess, running_gateway
from tests.processes import run, running
from tests.sglang_receiver import LanguageServer
from tests.small_store import STORE_GIB
from tests.waiting import PATIENCE_S, START_S, soon

FIRST, SECOND = photo(300, 220, 1), photo(256, 400, 2)


async def has_health(gateway: GatewayProcess, status: int) -> bool:
    async with httpx2.AsyncClient(timeout=100) as http:
        return (await http.get(f"{gateway.url}/v0/health")).status_code == status


@asynccontextmanager
async def bootstrap_server(
    registers: asyncio.Barrier | None = None,
) -> AsyncIterator[tuple[str, list[tuple[str, str]]]]:
    """Run a server like SGLang's encoder bootstrap server; yield its URL and the calls it answered: method path, url.

    A registration comes to the barrier when it has arrived, and before it is answered.
    """
    calls: list[tuple[str, str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        if registers and head.startswith("POST"):
            await registers.wait()
            await registers.wait()
        calls.append((" ".join(head.split()[:2]), body["url"]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nOK")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", calls


async def test_a_gateway_serves_registers_and_ends_in_order(process: ServerProcess, checkpoint: Path) -> None:
    before = process.encodes()
    async with bootstrap_server() as (bootstrap, calls):
        settings = {
            "register_at": bootstrap,
            "register_as": "http://gateway:30001/",
            "virtual_encoders": 2,
            "language_model": checkpoint,
        }
        with running_gateway(process.endpoint, **settings) as gateway:
            expected = [("POST /register_encoder_url", f"http://gateway:30001/v{n}") for n in (0, 1)]
            await soon(lambda: calls[-2:] == expected)  # a busy machine may be too late for an earlier call
            async with LanguageServer(gateway.url, ranks=2) as sglang:
                assert len((await sglang.to_tokenizer([data_url(FIRST)], [data_url(SECOND)])).parts) == 2
                assert len((await sglang.to_scheduler([data_url(FIRST)])).messages) == 2
            assert process.encodes() == before + 2
            assert await asyncio.to_thread(gateway.terminate) == 0
            gone = [("DELETE /unregister_encoder_url", f"http://gateway:30001/v{n}") for n in (0, 1)]
            assert calls[-2:] == gone
            log = gateway.log.read_text()
    assert "served, 1 images" in log
    assert "Traceback" not in log


async def test_a_gateway_accepts_parts_for_a_while_after_it_unregistered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefill_client.sglang_gateway.registration.LAST_PARTS_S", PATIENCE_S)
    async with bootstrap_server() as (bootstrap, calls):
        registration = Registration([bootstrap], ["http://gateway:30001/v0"])
        keeping = asyncio.create_task(registration.keep())
        await soon(lambda: bool(registration._registered))
        ending = asyncio.create_task(registration.end())
        await soon(lambda: calls[-1][0].startswith("DELETE"))
        await asyncio.sleep(0.1)
        assert not ending.done()
        ending.cancel()
        keeping.cancel()


async def test_a_bootstrap_server_with_invalid_answers_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_client.sglang_gateway.registration.REGISTER_EVERY_S", 0.01)
    calls = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.write(b"SSH-2.0-other\r\n")  # another program has the port of an SGLang that has ended
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        bootstrap = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        keeping = asyncio.create_task(Registration([bootstrap], ["http://gateway:30001/v0"]).keep())
        await soon(lambda: calls >= 3 or keeping.done())
        assert not keeping.done()
        keeping.cancel()


async def test_a_gateway_that_ends_while_it_registers_is_not_left_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in {"LAST_PARTS_S": 0.0, "REGISTER_EVERY_S": 0.0, "_CALL_S": PATIENCE_S}.items():
        monkeypatch.setattr(f"prefill_client.sglang_gateway.registration.{name}", seconds)
    registers = asyncio.Barrier(2)
    async with bootstrap_server(registers) as (bootstrap, calls):
        registration = Registration([bootstrap], ["http://gateway:30001/v0"])
        keeping = asyncio.create_task(registration.keep())
        await registers.wait()  # SGLang has the call
        ending = asyncio.create_task(registration.end())
        await asyncio.sleep(0.05)
        await registers.wait()
        await asyncio.gather(ending, keeping)
    assert [call.split()[0] for call, _ in calls] == ["POST", "DELETE"]


async def test_parts_outlast_a_restart_of_the_service(checkpoint: Path, tmp_path: Path) -> None:
    at = {"listen": f"unix:{tmp_path / 'socket'}", "store_host_gib": STORE_GIB}
    first = ServerProcess(checkpoint, **at)
    first.wait_until_it_listens()
    try:
        with running_gateway(at["listen"], part_s=START_S) as gateway:
            async with LanguageServer(gateway.url) as sglang:
                assert len((await sglang.to_tokenizer([data_url(FIRST)])).parts) == 1
                first.kill()
                await soon(lambda: has_health(gateway, 503))
                asking = asyncio.create_task(sglang.to_tokenizer([data_url(FIRST)], [data_url(SECOND)]))
                second = ServerProcess(checkpoint, **at)
                try:
                    await asyncio.to_thread(second.wait_until_it_listens)
                    assert len((await asking).parts) == 2
                    assert second.encodes() == 2
                    await soon(lambda: has_health(gateway, 200))
                    await soon(lambda: any("serves again" in line for line in gateway.lines))
                finally:
                    second.kill()
    finally:
        first.kill()


async def test_a_service_that_stays_down_is_answered_with_503(checkpoint: Path) -> None:
    with (
        running(checkpoint) as server,
        running_gateway(server.endpoint, part_s=8) as gateway,  # the first attempt gives up after two seconds
    ):
        server.kill()
        async with LanguageServer(gateway.url) as sglang:
            asking = asyncio.create_task(sglang.to_scheduler([data_url(FIRST)]))
            ((status, message),) = (await sglang.to_tokenizer([data_url(FIRST)])).refusals
            assert (status, server.endpoint in message) == (503, True), message
            await soon(
                lambda: any("no replica of the encoder service serves" in line for line in gateway.lines)
            )
            async with httpx2.AsyncClient(timeout=START_S) as http:
                health = await http.get(f"{gateway.url}/health")
                assert (health.status_code, server.endpoint in health.json()["message"]) == (503, True)
                assert "sglang_gateway_service_up 0.0" in (await http.get(f"{gateway.url}/metrics")).text
            (stand_in,) = (await asking).parts
            assert stand_in.data.dtype == "uint8"


async def test_a_gateway_with_a_client_certificate_tells_when_it_expires(
    checkpoint: Path, tmp_path: Path
) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "ca.pem")
    server, client = authority.issue(tmp_path, "server", HOSTS), authority.issue(tmp_path, "client")
    tls = {"encoder_tls_ca": ca, "encoder_tls_cert": client.cert, "encoder_tls_key": client.key}
    with (
        running(checkpoint, tls_cert=server.cert, tls_key=server.key, tls_client_ca=ca) as service,
        running_gateway(service.endpoint, **tls) as gateway,
    ):
        async with httpx2.AsyncClient(timeout=START_S) as http:
            metrics = (await http.get(f"{gateway.url}/metrics")).text
        (value,) = re.findall(
            r'certificate_expiration_timestamp_seconds{certificate="client"} (\S+)', metrics
        )
        expires = x509.load_pem_x509_certificate(Path(client.cert).read_bytes()).not_valid_after_utc
        assert float(value) == expires.timestamp()


def test_a_gateway_of_another_model_is_refused_at_start(
    process: ServerProcess, kept_checkpoint: Any, checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).symlink_to(file)
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").unlink()
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    seeded = kept_checkpoint(seed=5)
    for folder, what in ((other, "image processor: "), (seeded, "vision weights: ")):
        done = run(
            "encoder-sglang-gateway", "--encoder", process.endpoint, "--listen", "127.0.0.1:0",
            "--language-model", folder,
        )  # fmt: skip
        assert (done.returncode, what in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--receivers", "nowhere"), "--receivers"),
        (("--receiver-ports", "9-1"), "--receiver-ports"),
        (("--image-hosts", "http://x"), "--image-hosts"),
        (("--language-model", "/no/such/folder"), "--language-model"),
        (("--listen", "unix:/tmp/x"), "--listen"),
        (("--encoder", ","), "--encoder"),
        (("--encoder", "127.0.0.1:1,nowhere"), "--encoder nowhere must be host:port"),
        (("--encoder", "dns:nowhere"), "--encoder nowhere must be host:port"),
        (("--register-at", "sglang:8997"), "--register-at must begin with http://"),
        (("--register-as", "gateway:30001"), "--register-as must begin with http://"),
        (("--start-s", "0.2", "--encoder", "127.0.0.1:1"), "127.0.0.1:1"),
    ],
)
def test_an_invalid_setting_is_named(setting: tuple[str, ...], message: str) -> None:
    done = run("encoder-sglang-gateway", "--listen", "127.0.0.1:0", *setting)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
