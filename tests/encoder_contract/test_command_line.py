"""Behaviour of all commands: endpoints are checked before use, and errors are one line."""

import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

from encoder_contract.command_line import CommandLine, did_you_mean, endpoint, seconds
from encoder_contract.endpoint import Endpoint, check_server


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051, "")),
        ("localhost:0", ("localhost", 0, "")),
        ("encoder-0.replicas.ns.svc:65535", ("encoder-0.replicas.ns.svc", 65535, "")),
        ("[::1]:50051", ("::1", 50051, "")),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1, "")),
        ("unix:/run/encoder.sock", ("", 0, "/run/encoder.sock")),
        ("unix:///run/encoder.sock", ("", 0, "/run/encoder.sock")),
    ],
)
def test_an_endpoint_is_parsed(text: str, parsed: tuple[str, int, str]) -> None:
    assert Endpoint.parse(text) == parsed
    if not text.endswith(":0"):
        assert endpoint(text) == text


def test_the_address_of_a_server_has_a_port() -> None:
    check_server("dns:host:1")
    for text in ("host:0", "[::1]:0"):
        with pytest.raises(ArgumentTypeError, match="the port of a server"):
            endpoint(text)
        with pytest.raises(ValueError, match="the port of a server"):
            check_server(f"dns:{text}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", ":50051", "host:", "host:x", "host:65536", "host:-1", "host:١", "::1:50051", "a b:1"),
        *("http://host:1", "host:1/path", "user@host:1", "unix:", "unix:/" + "x" * 107),
    ],
)
def test_an_invalid_endpoint_is_refused_with_the_format(text: str) -> None:
    with pytest.raises(ValueError, match="unix:/path"):
        Endpoint.parse(text)


def parser() -> CommandLine:
    line = CommandLine(prog="program")
    command = line.add_subparsers(dest="command").add_parser("serve")
    command.add_argument("--metrics-listen", type=endpoint)
    command.add_argument("--timeout-s", type=seconds)
    command.add_argument("servers", nargs="*", type=endpoint)
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["serve", "--metric-listen", "x"],
            "unknown argument --metric-listen (did you mean --metrics-listen?)",
        ),
        (["serve", "--metric-listen=x"], "unknown argument --metric-listen (did you mean --metrics-listen?)"),
        (["serve", "--metrics", "a:1"], "unknown argument --metrics"),
        (["serve", "--timeout", "3"], "unknown argument --timeout (did you mean --timeout-s?)"),
        (["serve", "--", "--timeout"], "--timeout must be host:port"),
        (["--quiet", "serve"], "program: unknown argument --quiet;"),
        (["--quiet", "other"], "program: unknown argument --quiet;"),
        (["--quiet"], "program: unknown argument --quiet;"),
        (["--hope", "serve"], "program: unknown argument --hope;"),  # like --help in its dashes only
        (["serve", "--metrics-listen", "nowhere"], "nowhere must be host:port"),
        (["serve", "--timeout-s", "0"], "must be positive"),
        (["serve", "--timeout-s", "nan"], "must be positive"),
        (["serve", "--timeout-s", "soon"], "'soon'"),
        (["sreve"], "'serve'"),
    ],
)
def test_a_usage_error_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in told
    assert told.count("\n") == 1
    assert told.endswith("--help\n")


def test_only_similar_words_are_suggested() -> None:
    assert did_you_mean("--quux", ["--model", "--listen"]) == ""


def test_a_server_whose_output_is_full_serves_and_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(
        "PYTHONUNBUFFERED", raising=False
    )  # with it, nothing is left for the end of the process
    program = "from encoder_contract.command_line import say; say('listening'); say('again')"
    with open("/dev/full", "w") as full:
        said = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (said.returncode, said.stderr) == (0, b"")


ENDS = """
import atexit, sys, threading, time
from encoder_contract.command_line import command

class Kept:
    def __del__(self):
        print("taken apart", file=sys.stderr)

sys.modules["kept"] = Kept()  # as a module, it goes when the interpreter takes its modules apart
sys.modules["kept"].itself = sys.modules["kept"]  # and only then

def late():
    time.sleep(0.2)
    print("thread", end=" ")

@command
def main(arguments=None):
    atexit.register(lambda: print("exit function", end=" "))
    threading.Thread(target=late).start()
    print("main", end=" ")
    return 7

sys.exit(main())
"""


def test_a_command_ends_in_order_but_takes_no_modules_apart() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")
    assert ended.stdout.split() == ["main", "thread", "exit", "function"]


@pytest.mark.parametrize(
    "module", ["encoder_service", "prefill_client", "prefill_reference", "prefill_client.sglang_gateway"]
)
def test_no_command_imports_grpc_before_its_verbosity_is_set(module: str) -> None:
    code = f"import sys, {module}.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
