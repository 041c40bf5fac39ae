"""The commands that pages tell a reader to type: programs, flags and their values, make targets, settings."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from encoder_contract.command_line import BAD_USAGE, FAILED
from encoder_service.devices import EXIT_LOST, EXIT_STUCK
from tests.pages import OF_NOW, PAGES, ROOT, lines_in, name_of, named
from tests.processes import run

FLAG = r"(?<![\w-])(--[a-z][a-z-]*[a-z])(?![\w-])"
OURS = ("encoder-service", "prefill-client")
SERVICES = ("prefill-reference", "encoder-sglang-gateway")  # commands without subcommands
MAIN = 'if __name__ == "__main__"'
BENCHMARK = "command_line(__doc__)"  # adds the flag that all benchmarks have
# Programs that are not ours. Their flags are not checked.
FOREIGN = (
    r"\b(docker compose|docker|helm|kubectl|redis-cli|redis-server|pip|hf|curl|git|npm|pytest|"
    r"up --detach|up --wait)\b"
)
PACKAGES = ("bench", "demo", "testing")
# Flags of vLLM on pages about it. tests/vllm checks that they exist.
VLLM = {
    *("--middleware", "--ec-transfer-config", "--ec-manager-config", "--limit-mm-per-prompt"),
    *("--allowed-media-domains", "--mm-processor-kwargs", "--media-io-kwargs", "--served-model-name"),
    *("--max-model-len", "--port", "--pipeline-parallel-size", "--download-dir", "--revision"),
    *("--load-format", "--kv-transfer-config", "--kv-events-config", "--trust-request-mm-kwargs"),
    *("--chat-template-content-format", "--video-pruning-rate", "--default-mm-loras", "--grpc"),
    *("--allowed-local-media-path", "--headless", "--gpu-memory-utilization"),
    *("--disable-chunked-mm-input", "--max-num-batched-tokens", "--enable-scale-out"),
}
# Flags of SGLang on the page about it. tests/sglang starts it with them.
SGLANG = {
    *("--model-path", "--enable-metrics", "--mm-process-config", "--language-model-only", "--language-only"),
    *("--encoder-urls", "--encoder-transfer-backend", "--pp-size", "--encoder-only"),
}
# Matches our program in a line: `encoder-service top`, `python -m bench.store`, `bench.store`.
PROGRAM = (
    rf"(?<![\w/-])(?:\.venv/bin/)?({'|'.join(OURS)}) ([a-z]+(?:-[a-z]+)*)"
    rf"|(?<![\w/-])({'|'.join(SERVICES)})(?![\w-])"
    rf"|-m ((?:{'|'.join(PACKAGES)})[\w.]*)|\b(bench\.\w+)\b(?!/)"
)

Commands = Mapping[str, str]


@pytest.fixture(scope="module")
def commands() -> Commands:
    """The --help text of each of our commands; for a command of `python -m`, its source."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COLUMNS", "1000")  # so that no line is wrapped
        found = {program: run(program, "--help").stdout for program in SERVICES}
        for program in OURS:
            for sub in re.findall(r"^    ([\w-]+)(?: |$)", run(program, "--help").stdout, re.MULTILINE):
                found[f"{program} {sub}"] = run(program, sub, "--help").stdout
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if MAIN in (source := path.read_text()):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")] = source
    return found


def flags_of(command: str, commands: Commands) -> set[str]:
    text = commands[command]
    if not command.startswith(PACKAGES):
        return named(FLAG, text)
    return named(rf'"{FLAG}"', text) | ({"--json"} if BENCHMARK in text else set())


def programs_in(line: str) -> list[str]:
    """Return the programs that a line runs; `bench.NAME` stands for any benchmark."""
    found = [f"{a} {b}" if a else "".join(others) for a, b, *others in re.findall(PROGRAM, line)]
    return ["bench.store" if program == "bench.NAME" else program for program in found]


@pytest.mark.parametrize("page", OF_NOW, ids=name_of)
def test_every_command_on_a_page_exists(page: Path, commands: Commands) -> None:
    for line in lines_in(page):
        for program in programs_in(line):
            assert program in commands, f"{program!r} in {line!r}"


@pytest.mark.parametrize("page", OF_NOW, ids=name_of)
def test_every_flag_on_a_page_exists(page: Path, commands: Commands) -> None:
    """A flag without a command must be one of the services', or of a benchmark that the page names."""
    lines = list(lines_in(page))
    here = {program for line in lines for program in programs_in(line)} & set(commands)
    services = {"encoder-service serve", *SERVICES}
    alone = set().union(*(flags_of(program, commands) for program in here | services))
    for line in lines:
        if re.search(FOREIGN, line):
            continue
        programs = [program for program in programs_in(line) if program in commands]
        allowed = set().union(*(flags_of(program, commands) for program in programs)) if programs else alone
        assert named(FLAG, line) <= allowed | VLLM | SGLANG | {"--help", "--version"}, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_value_on_a_page_is_accepted(page: Path, commands: Commands) -> None:
    choices = {
        flag: set(values.split(","))
        for program in ("encoder-service serve", "prefill-reference")
        for flag, values in re.findall(r"(?m)^  (--[a-z-]+) \[?\{([\w,]+)\}", commands[program])
    }
    assert {"--decoder", "--trust-remote-code"} <= choices.keys()
    for line in lines_in(page):
        for flag, value in re.findall(r"(--[a-z-]+) ([a-z]\w*)", line):
            assert flag not in choices or value in choices[flag], line


def test_every_environment_name_exists(commands: Commands) -> None:
    known = {setting for text in commands.values() for setting in named(r"; (\w+SVC_[A-Z_]+)\)", text)}
    assert {"ENCSVC_LISTEN", "PREFILLSVC_LISTEN", "SGLANGSVC_LISTEN"} <= known
    deployed = [*(ROOT / "deploy").rglob("*.y*ml"), ROOT / "deploy" / ".env.example"]
    for path in [*PAGES, *deployed]:
        assert named(r"\b([A-Z]+SVC_[A-Z_]*[A-Z])\b", path.read_text()) <= known, path.name


def test_make_targets_and_variables_on_pages_exist_and_are_described() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = named(r"(?m)^\.PHONY: ([a-z-]+)$", makefile)
    variables = named(r"(?m)^([A-Z]+) +\?=", makefile)
    assert targets == named(r"(?m)^([a-z-]+):.*## \w", makefile)
    for page in OF_NOW:
        for line in lines_in(page):
            for target, rest in re.findall(r"(?:^|[;&(] *)make ([a-z-]+)(.*)", line.strip()):
                assert target in targets, f"{page.name}: {line}"
                assert named(r"\b([A-Z]+)=", rest) <= variables, f"{page.name}: {line}"


def test_every_module_and_flag_that_the_makefile_runs_exists(commands: Commands) -> None:
    run_by = {}
    for line in (ROOT / "Makefile").read_text().splitlines():
        for program in set(programs_in(line)):
            assert program in commands, line
            assert named(FLAG, line) <= flags_of(program, commands), line
            run_by[program] = line
    assert {"bench", "demo.run", "demo.local_cluster"} <= set(run_by)


def test_every_exit_code_on_a_page_is_one_of_ours() -> None:
    for page in PAGES:
        codes = named(r"(?i)\bexit(?:s| code)? (\d+)\b|\bcode (\d+)\b", page.read_text())
        found = {int(code) for pair in codes for code in pair if code}
        assert found <= {0, FAILED, BAD_USAGE, EXIT_LOST, EXIT_STUCK}, page.name


def test_every_extra_a_page_installs_exists() -> None:
    extras = named(r"(?m)^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text())
    for page in PAGES:
        for names in named(r"encoder-service\[([\w,-]+)\]", page.read_text()):
            assert set(names.split(",")) <= extras, page.name
