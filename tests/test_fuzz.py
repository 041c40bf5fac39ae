"""The fuzzer: cases of every target pass, and it finds crashes and hangs."""

import subprocess
import sys

import pytest

from testing.fuzz import __main__ as fuzz
from testing.fuzz import parsers


@pytest.mark.parametrize("target", parsers.PARSERS)
def test_seeded_cases_of_every_parser_pass(target: str) -> None:
    verdict = fuzz.fuzz([target], 500, seed=7)
    assert verdict.cases[target] == 500
    assert verdict.failures == []


@pytest.mark.attack("damaged bytes for any parser, in any call")
def test_seeded_calls_pass_and_leave_nothing_on_a_server() -> None:
    command = [
        sys.executable,
        "-m",
        "testing.fuzz",
        "--targets",
        "submit",
        "fetch",
        "images",
        "videos",
        "crowds",
        "rows",
        "--cases",
        "480",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert '"cases": 480' in ran.stdout


def test_crashes_and_hangs_are_counted_with_the_command_that_repeats_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def crash(data: bytes) -> None:
        seen.append(data)
        raise KeyError(len(data))

    monkeypatch.setattr(parsers, "read_header", crash)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--targets", "header", "--seed", "42", "--cases", "3"])
    assert fuzz.main() == 1
    said = capsys.readouterr().out
    assert '"crashes": 3' in said
    assert "--targets header --seed 43 --cases 1" in said
    seen_before = seen[1]
    fuzz.fuzz(["header"], 1, seed=43)
    assert seen[-1] == seen_before, "the same case once more"

    monkeypatch.setattr(parsers, "read_header", lambda _: None)
    monkeypatch.setattr(parsers, "MAX_CASE_S", -1.0)
    assert fuzz.fuzz(["header"], 2, seed=0).hangs == 2
