"""Errors at the command line: one line that says what to fix, and never a traceback."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from encoder_contract.errors import UnavailableError
from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import Model
from prefill_client import EncoderClient
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from testing.processes import free_port
from tests.closed_port import closed_port
from tests.processes import SCRIPTS, run
from tests.scripted_device import ScriptedDevice
from tests.servers import server_of
from tests.waiting import PATIENCE_S, START_S, within_some_limit

# Not /dev/shm, where a server tells which files of dead servers it removes.
IN_TMP = f"--store-segment-dir {tempfile.gettempdir()}"
TAKEN = "the address is taken: choose another one, or stop the process that listens there"
CORE_LOG = re.compile(r"^[EIW]\d{4} ", re.MULTILINE)  # how a line of gRPC's C++ core begins


def refused(*command: str | Path, code: int) -> str:
    """Run a command that has to fail, and return the one line that it says."""
    result = run(*command)
    assert not result.stdout
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert not CORE_LOG.search(result.stderr)
    return result.stderr


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def free() -> Iterator[str]:
    """A port on which no server listens."""
    with closed_port() as port:
        yield port


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that import torch end at once: it takes them seconds."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--listen 127.0.0.1:99999", "--listen 127.0.0.1:99999 must be host:port"),
        ("--listen unix:/nowhere/encoder.sock", "No such file or directory"),
        ("--listen 127.0.0.1:0 --metrics-listen 127.0.0.1:99999", "--metrics-listen 127.0.0.1:99999"),
        ("--listen 192.0.2.1:50051 --listen-unprotected yes", "--listen 192.0.2.1:50051: Cannot assign"),
        ("--listen 0.0.0.0:0", "--listen beyond this host needs --tls-cert, or --listen-unprotected yes"),
        ("--metrics-listen [::]:0", "--metrics-listen beyond this host needs --tls-cert"),
        ("--tls-cert cert.pem", "--tls-cert needs --tls-key"),
        ("--tls-client-ca ca.pem", "--tls-client-ca needs --tls-cert"),
        (
            "--tls-cert /nowhere/cert.pem --tls-key /nowhere/key.pem",
            "--tls-cert: /nowhere/cert.pem: No such file or directory",
        ),
        ("--listen 127.0.0.1:1 --metrics-listen 127.0.0.1:1", "must differ from --listen"),
        (
            "--devices gpu",
            "--devices must be auto, or a comma-separated list of cpu, cuda or cuda:N, got gpu",
        ),
        ("--store-host-gib inf", "--store-host-gib must be positive and finite, got inf"),
        ("--drain-s nan", "--drain-s"),
        ("--call-window-kib 2097152", "--call-window-kib must be from 1 to 2097151, got 2097152"),
        ("--decode-threads 100000", "--decode-threads must be from 0 to 256, got 100000"),
        ("--attention flash", "--attention"),
        ("--index reddis://:secret@host", "reddis://***@host"),
        ("--metric-listen 127.0.0.1:0", "did you mean --metrics-listen?"),
        ("--listen 127.0.0.1:0 --model /nowhere/model", "/nowhere/model: there is no such folder"),
        (f"--listen 127.0.0.1:0 {IN_TMP} --store-host-gib 1e6", "(Docker and Compose: shm_size;"),
        ("--listen 127.0.0.1:0 --store-segment-dir /nowhere", "--store-segment-dir /nowhere does"),
        (
            f"--listen 127.0.0.1:0 {IN_TMP} --store-host-gib 0.01 --store-disk /proc/encoder",
            "--store-disk /proc/encoder cannot be used",
        ),
    ],
)
def test_an_invalid_value_is_refused_before_torch_is_imported(
    checkpoint: Path, flags: str, says: str, without_torch: None
) -> None:
    assert says in refused("encoder-service", "serve", "--model", checkpoint, *flags.split(), code=2)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("foo=1", "unknown option 'foo'"),
        ("socket_timeout=soon", "option with an invalid value: .*socket_timeout"),
    ],
)
async def test_a_wrong_option_of_the_index_url_is_reported(
    config: Config, model: Model, option: str, says: str
) -> None:
    config = replace(config, index=f"redis://127.0.0.1:1/0?{option}")
    with pytest.raises(ConfigError, match=f"--index: the URL has an {says}"):
        await Server(config, [ScriptedDevice(config, model)], model.decoder.files).start()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "is not a Hugging Face checkpoint folder (to download one: hf download NAME"),
        ({"config.json": '{"model_type": "llama"}'}, "model_type 'llama' has no vision part"),
        ({"config.json": "{"}, "config.json"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_naming_what_is_wrong(
    tmp_path: Path, checkpoint: Path, files: dict[str, str], says: str, without_torch: None
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    if files:
        settings = (checkpoint / "preprocessor_config.json").read_text()
        (folder / "preprocessor_config.json").write_text(settings)
    serve = ("encoder-service", "serve", "--model", folder, "--listen", "127.0.0.1:0")
    assert says in refused(*serve, code=2)


def test_a_misspelt_environment_variable_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCSVC_MODLE", "x")
    assert "did you mean ENCSVC_MODEL?" in refused("encoder-service", "serve", code=2)


@pytest.mark.parametrize("setting", ["--listen", "--metrics-listen", "--rows-listen"])
def test_a_taken_port_is_reported_before_reading_the_model(tmp_path: Path, taken: str, setting: str) -> None:
    other = "--metrics-listen" if setting == "--listen" else "--listen"
    said = refused(
        *("encoder-service", "serve", "--model", tmp_path, setting, taken, other, "127.0.0.1:0"), code=2
    )
    assert said == f"encoder-service: {setting} {taken}: {TAKEN}\n"


def test_a_socket_file_of_a_running_server_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "encoder.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        said = refused("encoder-service", "serve", "--model", checkpoint, "--listen", f"unix:{path}", code=2)
        assert TAKEN in said


def test_a_refused_connection_is_reported_in_one_line(free: str, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))
    for command in (
        ("prefill-client", "encode", tmp_path / "photo.jpg", "--server", free),
        ("encoder-service", "flush", "--server", free),
    ):
        assert f"{free}: no server answers (Connection refused)" in refused(*command, code=1)


def test_a_port_of_another_kind_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))
    encode = ("prefill-client", "encode", tmp_path / "photo.jpg", "--server")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        said = refused(*encode, f"127.0.0.1:{web.server_port}", code=1)
        assert "the server does not speak gRPC: give the address of its --listen" in said
        web.shutdown()


def test_an_invalid_address_is_refused_without_a_lookup() -> None:
    assert "64 hexadecimal" in refused("encoder-service", "evict", "abcd", code=1)
    assert "unix:/path" in refused("encoder-service", "flush", "--server", "http://127.0.0.1:1", code=2)
    assert "unix:/path" in refused("prefill-client", "encode", "x.jpg", "--server", "nowhere", code=2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, got gpu"),
        (["--listen", "127.0.0.1:99999"], "--listen 127.0.0.1:99999 must be host:port"),
        (["--encoder", "nowhere"], "--encoder nowhere must be host:port"),
        (["--listn", "127.0.0.1:0"], "did you mean --listen?"),
        (["--model", "/nowhere/model"], "/nowhere/model: there is no such folder"),
    ],
)
def test_the_prefill_service_refuses_bad_settings_before_importing_torch(
    checkpoint: Path, flags: list[str], says: str, without_torch: None
) -> None:
    assert says in refused("prefill-reference", "--model", checkpoint, *flags, code=2)


def test_the_prefill_service_reports_a_taken_port_before_importing_torch(
    checkpoint: Path, taken: str, free: str, without_torch: None
) -> None:
    said = refused(
        *("prefill-reference", "--model", checkpoint, "--listen", taken, "--encoder", free), code=2
    )
    assert said == f"prefill-reference: --listen {taken}: {TAKEN}\n"


@pytest.mark.parametrize("damage", ["cut off", "a pointer of Git LFS", "missing"])
@pytest.mark.parametrize("command", ["encoder-service serve", "prefill-reference"])
def test_weights_that_are_not_there_are_reported_before_importing_torch(
    checkpoint: Path, tmp_path: Path, command: str, damage: str, without_torch: None
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    weights = folder / "model.safetensors"
    if damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "missing":
        named = {"weight_map": {"model.visual.merger.norm.bias": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    else:
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9000\n")
    said = refused(*command.split(), "--model", folder, "--listen", "127.0.0.1:0", code=2)
    assert damage in said
    assert ("00002-of-00002" if damage == "missing" else str(weights)) in said
    assert ("git lfs pull" if "LFS" in damage else "download the model again") in said


async def test_a_port_of_another_protocol_is_told_with_what_to_change(
    config: Config, model: Model, tmp_path: Path
) -> None:
    """The client of a TLS port, of a plain one, of one that wants a certificate, and of the metrics port."""
    authority = Authority()
    ca, issued = authority.write(tmp_path / "ca.pem"), authority.issue(tmp_path, "server", HOSTS)
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))
    tls = {"tls_cert": issued.cert, "tls_key": issued.key}
    async with (
        server_of(config, model) as plain,
        server_of(config, model, **tls) as secure,
        server_of(config, model, **tls, tls_client_ca=ca) as mutual,
    ):
        for address, flags, says in (
            (plain.endpoint, ["--tls-ca", ca], "does not use TLS: leave out the authority (ca)"),
            (secure.endpoint, [], "set the authority of its certificate (ca)"),
            (secure.endpoint, ["--tls-ca", "public"], "set the authority (ca) that issued the server's"),
            (secure.endpoint, ["--tls-ca", ca, "--tls-name", "other"], "set the name (server_name)"),
            (mutual.endpoint, ["--tls-ca", ca], "set one and its key (cert, key)"),
            (plain.watch.endpoint, [], "does not speak gRPC: give the address of its --listen"),
        ):
            for command in (
                ["prefill-client", "encode", tmp_path / "photo.jpg"],
                ["encoder-service", "flush"],
            ):
                said = await asyncio.to_thread(refused, *command, "--server", address, *flags, code=1)
                assert f"{address}: no server answers (" in said
                assert says in said


def test_a_url_is_no_image_file() -> None:
    said = refused("prefill-client", "encode", "https://host/photo.jpg", code=2)
    assert "https://host/photo.jpg is a URL: this command reads files, so download it first" in said


def test_top_writes_its_errors_to_standard_error(free: str, tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    top = ("encoder-service", "top", "--once")
    for arguments, code, says in (
        ([free], 1, f"encoder-service: {free}: Connection refused: nothing listens there"),
        (["nowhere"], 2, "nowhere must be host:port"),
        (["unix:/encoder.sock"], 2, "unix:/encoder.sock must be host:port"),
        (["https://localhost:1", "--tls-ca", "/nowhere/ca.pem"], 2, "--tls-ca /nowhere/ca.pem: No such file"),
        (
            ["https://localhost:1", "--tls-ca", tmp_path / "no.pem"],
            2,
            "no.pem: not a PEM file of certificates",
        ),
    ):
        assert says in refused(*top, *arguments, code=code)


async def test_this_host_needs_no_proxy(server: Server, free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://{free}")
    port = server.watch.endpoint.rpartition(":")[2]
    top = ("encoder-service", "top", "--once", server.watch.endpoint, f"http://localhost:{port}")
    shown = await asyncio.to_thread(run, *top)
    assert (shown.returncode, shown.stdout.count("serving"), shown.stderr) == (0, 2, "")
    # In a pipe, no line is cut: one table has all columns.
    assert shown.stdout.splitlines()[0].split()[-2:] == ["loop", "p99"]


@pytest.mark.parametrize(("command", "module"), [("serve", "torch"), ("top --once", "rich")])
def test_a_missing_package_is_named_with_its_extra(checkpoint: Path, command: str, module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; from encoder_service.cli import main; sys.exit(main())"
    )
    flags = ["--model", str(checkpoint), "--listen", "127.0.0.1:0"] if command == "serve" else []
    result = subprocess.run(
        [sys.executable, "-c", code, *command.split(), *flags], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert module in result.stderr
    assert "pip install '.[server]'" in result.stderr


def test_a_disk_too_small_for_the_store_names_the_flag(checkpoint: Path) -> None:
    # There is no small disk here; a limit on the size of a file fails in the same call.
    serve = [str(SCRIPTS / "encoder-service"), "serve", "--model", str(checkpoint), "--listen", "127.0.0.1:0"]
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", limited, *serve, "--store-host-gib", "0.1"],
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "--store-host-gib" in result.stderr
    assert "Traceback" not in result.stderr


async def test_closed_and_full_outputs_print_no_traceback(server: Server, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))

    def lose_outputs() -> None:
        for words in (
            ["encoder-service", "flush", "--server", server.endpoint],
            ["prefill-client", "encode", tmp_path / "photo.jpg", "--server", server.endpoint],
        ):
            command = [SCRIPTS / str(words[0]), *words[1:]]
            read, write = os.pipe()
            os.close(read)
            left = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
            os.close(write)
            assert (left.returncode, left.stderr) == (1, b"")
            with open("/dev/full", "w") as full:
                told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
            assert (told.returncode, told.stderr) == (1, b"standard output: No space left on device\n")

    await asyncio.to_thread(lose_outputs)


async def test_a_client_that_waited_in_vain_says_why(free: str) -> None:
    async def attempt(limit_s: float) -> bool:
        with pytest.raises(
            UnavailableError, match=f"{free}: no server answered within {limit_s:g} s"
        ) as told:
            await EncoderClient.connect(free, timeout_s=limit_s)
        return str(told.value).endswith(": Connection refused")

    await within_some_limit(attempt)


async def test_a_client_waits_for_a_server_that_is_starting(config: Config, model: Model) -> None:
    free = f"127.0.0.1:{free_port()}"
    connecting = asyncio.create_task(EncoderClient.connect(free, timeout_s=PATIENCE_S))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(UnavailableError, match="no server answers"):
            await EncoderClient.connect(free, timeout_s=PATIENCE_S, wait=False)
    assert not connecting.done()
    async with server_of(config, model, listen=free), await connecting as client:
        assert client.description.model_name == config.model.name
