"""The command lines, as real processes: what they print, what they refuse, how they end."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import UnavailableError
from encoder_contract.version import __version__
from encoder_service.api import admin_client
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.certificates import HOSTS, Authority, write_tenants
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.closed_port import closed_port
from tests.gate import Gate
from tests.operator_view import fetches_wait_for
from tests.processes import run, running
from tests.servers import server_of
from tests.small_store import STORE_GIB
from tests.waiting import PATIENCE_S, soon


@pytest.mark.parametrize("command", ["encoder-service", "prefill-client"])
def test_version_and_help(command: str) -> None:
    assert run(command, "--version").stdout.split() == [command, __version__]
    assert "COMMAND" in run(command, "--help").stdout
    assert run(command).returncode == 2


def test_a_wrong_flag_is_named() -> None:
    result = run("encoder-service", "serve", "--modle", "x")
    assert result.returncode == 2
    assert "--modle" in result.stderr


def test_a_taken_port_is_a_clear_error(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run(
            "encoder-service", "serve", "--model", checkpoint, "--listen", address, "--store-host-gib", "0.04"
        )
    assert result.returncode == 2
    assert address in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_that_does_not_fit_is_refused_naming_what_to_set(checkpoint: Path) -> None:
    result = run("encoder-service", "serve", "--model", checkpoint, "--store-host-gib", "100000")
    assert result.returncode == 2
    assert "--store-host-gib" in result.stderr
    assert "shm_size" in result.stderr
    assert "Traceback" not in result.stderr


async def test_the_servers_own_process_has_no_torch(process: ServerProcess) -> None:
    """Torch takes seconds of a start, 200 MB, and long garbage collections. The device's process has it."""
    async with await EncoderClient.connect(process.endpoint) as client:
        (image,) = await client.submit([photo(320, 240, 1)])
        assert image.error is None
        async with client.fetch([RowRequest(image.digest)]) as stream:
            assert len([rows async for rows in stream]) == 1
    process.metrics()
    server = psutil.Process(process.process.pid)
    with_torch = [each.name() for each in (server, *server.children()) if _has_mapped(each.pid, "libtorch")]
    assert with_torch == ["device"]


def _has_mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


HOLD = """
import asyncio, sys
from prefill_client import EncoderClient, RowRequest

async def hold(endpoint, path):
    async with await EncoderClient.connect(endpoint) as client:
        (image,) = await client.submit([open(path, "rb").read()])
        async with client.fetch([RowRequest(image.digest)]) as stream:
            async for rows in stream:
                print(rows.transport, flush=True)
            await asyncio.sleep(60)

asyncio.run(hold(*sys.argv[1:]))
"""


def test_a_killed_client_soon_releases_its_shared_rows(process: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(320, 240, 1))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, process.endpoint, tmp_path / "photo.jpg"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stdout.readline() == "shm\n"
    assert process.metrics().total("store_pins") == 1
    holder.kill()
    holder.wait()
    wait_until_unpinned(process)


def wait_until_unpinned(process: ServerProcess) -> None:
    """Wait until the server has noticed the end of all callers that had rows pinned."""
    until = time.monotonic() + PATIENCE_S
    while (pins := process.metrics().total("store_pins")) and time.monotonic() < until:
        time.sleep(0.02)
    assert not pins


def test_a_missing_device_is_a_clear_error(checkpoint: Path) -> None:
    result = run("encoder-service", "serve", "--model", checkpoint, "--devices", "cuda:7")
    assert result.returncode == 2
    assert "cuda:7" in result.stderr


def test_the_start_up_block_names_devices_and_limits(process: ServerProcess) -> None:
    banner = "\n".join(process.lines)
    words = ("qwen3_vl", "cpu", "attention", "decoder", "store", "limits", "no TLS, no tenants, no fleet key")
    assert [word for word in words if word not in banner] == []


async def test_the_start_up_block_names_disk_ports_and_who_may_call(
    config: Config, model: Model, tmp_path: Path
) -> None:
    issued = Authority().issue(tmp_path, "server", HOSTS)
    write_tenants(tmp_path)
    async with server_of(
        config,
        model,
        rows_listen="127.0.0.1:0",
        tls_cert=issued.cert,
        tls_key=issued.key,
        tenants_file=str(tmp_path / "tenants.toml"),
        fleet_key_file=str(tmp_path / "fleet.key"),
        store_disk=str(tmp_path / "disk"),
        store_disk_gib=1,
    ) as server:
        told = server.banner()
        assert f"rows port    127.0.0.1:{server._rows_port.port}" in told
    assert "access       TLS, tenants, fleet key\n" in told
    assert f"disk         1 GiB in {tmp_path / 'disk'}\n" in told


async def test_encode_prints_address_grid_and_stages_and_refuses_non_images(
    server: Server, gate: Gate, tmp_path: Path
) -> None:
    good, bad = tmp_path / "photo.jpg", tmp_path / "notes.txt"
    good.write_bytes(photo(320, 240, 1))
    bad.write_bytes(b"not an image")
    encode = ("prefill-client", "encode", "--server", server.endpoint, good)
    with gate.closed():
        encoding = asyncio.create_task(asyncio.to_thread(run, *encode))
        await fetches_wait_for(server, 1)  # else it might be done before, and be held
    first = await encoding
    second = await asyncio.to_thread(run, *encode, bad, "--inline")
    assert first.returncode == 0, first.stderr
    assert "decode" in first.stdout
    assert "vit" in first.stdout
    assert "by shm" in first.stdout
    assert second.returncode == 1
    assert "the rows were in the store" in second.stdout
    assert second.stderr.startswith(f"prefill-client: {bad}: InvalidImageError: not an image")
    assert second.stderr.count("\n") == 1


def tier_and_files(process: ServerProcess) -> tuple[str, str]:
    """Return how many embeddings the host tier has, and how many image files are cached, as `top --once` shows them."""
    shown = run("encoder-service", "top", "--once", process.http_endpoint).stdout.splitlines()
    host, files = (
        [line.split() for line in shown if line.startswith(name)] for name in ("host", "image files")
    )
    return host[0][-3], files[0][-1]


def test_operator_commands_inspect_and_empty_the_store(process: ServerProcess, tmp_path: Path) -> None:
    list(admin_client.run("flush", process.endpoint))  # rows of other tests
    (tmp_path / "photo.jpg").write_bytes(photo(320, 240, 2))
    at = ("--server", process.endpoint)
    encoded = run("prefill-client", "encode", tmp_path / "photo.jpg", *at).stdout
    wait_until_unpinned(process)
    address = next(line.split()[1] for line in encoded.splitlines() if "address" in line)
    before = tier_and_files(process)
    dropped = run("encoder-service", "evict", address, *at)
    again = run("encoder-service", "evict", address, *at)
    flushed = run("encoder-service", "flush", *at)
    wrong = run("encoder-service", "evict", "xyz", *at)
    after = tier_and_files(process)
    assert (dropped.stdout, dropped.returncode) == ("dropped\n", 0)
    assert (again.stdout, again.returncode) == ("", 1)
    assert again.stderr == f"encoder-service: {process.endpoint}: not dropped: it is not held, or in use\n"
    assert flushed.stdout == "0 entries dropped\n"
    assert (wrong.returncode, "hexadecimal" in wrong.stderr) == (1, True)
    assert (before, after) == (("1", "1"), ("0", "0"))


def test_encode_reports_an_absent_server(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))
    with closed_port() as nobody:
        result = run(
            "prefill-client", "encode", tmp_path / "photo.jpg", "--server", nobody, "--timeout-s", "1"
        )
    assert result.returncode == 1
    assert "UnavailableError" in result.stderr
    assert nobody in result.stderr


async def test_sigterm_finishes_running_calls_refuses_new_ones_and_exits_0(checkpoint: Path) -> None:
    images = [photo(900 + n, 700, n) for n in range(8)]
    with running(checkpoint, log_format="json", drain_s=200) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            await client.submit(images)
            requests = [RowRequest(content_digest(image)) for image in images]
            async with client.fetch(requests, timeout_s=200, transports=["inline"]) as stream:
                outcomes = aiter(stream)
                first = await anext(outcomes)
                assert first.error is None
                ending = asyncio.create_task(asyncio.to_thread(server.terminate, 220))
                await soon(lambda: any("draining" in line for line in server.lines))
                (refused,) = await client.submit([photo(64, 64, 99)])
                rest = [outcome async for outcome in outcomes]
            assert [outcome.error for outcome in rest] == [None] * 7
            assert isinstance(refused.error, UnavailableError)
        assert await ending == 0
    told = [json.loads(line) for line in server.lines]  # every line, also of the settings
    assert [line["message"] for line in told[:1] + told[-1:]] == ["loading", "drained"]
    assert [line["listening"] for line in told if line["message"] == "listening"] == [server.endpoint]


@pytest.mark.parametrize("style", ["console", "json"])
def test_serve_says_loading_before_it_needs_torch(checkpoint: Path, style: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from encoder_service.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--model", str(checkpoint), "--listen", "127.0.0.1:0"]
    # Not in /dev/shm, where a server tells which files of dead servers it removes.
    command += ["--store-host-gib", str(STORE_GIB), "--store-segment-dir", str(tmp_path)]
    result = subprocess.run([*command, "--log-format", style], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    if style == "console":
        assert result.stdout == f"encoder-service {__version__}: loading {checkpoint} ...\n"
    else:
        assert result.stdout == ""
        told = [json.loads(line) for line in result.stderr.splitlines()]
        assert [(line["level"], line["message"].partition(";")[0]) for line in told] == [
            ("info", "loading"),
            ("error", "No module named 'torch'"),
        ]
