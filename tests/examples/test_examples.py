"""Runs the examples as a reader does, against a real server."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from prefill_client import BlockingClient, RowRequest
from testing.photos import photo
from testing.processes import LoggedProcess
from testing.server_process import ServerProcess
from tests.pages import ROOT
from tests.processes import SCRIPTS

EXAMPLES = ROOT / "examples"
WAIT_S = 300


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    (tmp_path / "photos").mkdir()
    files = [tmp_path / "photos" / f"{seed}.jpg" for seed in range(3)]
    for seed, path in enumerate(files):
        path.write_bytes(photo(200 + 32 * seed, 160, seed))
    return files


def output_of(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fetch_rows_prints_the_rows_without_torch(process: ServerProcess, photos: list[Path]) -> None:
    printed = output_of(sys.executable, EXAMPLES / "fetch_rows.py", photos[0], process.endpoint)
    with BlockingClient.connect(process.endpoint) as client:
        (image,) = client.submit([photos[0]])
        with client.fetch([RowRequest(image.digest)]) as outcomes:
            (rows,) = outcomes
            mean = rows.tensor().float().mean().item()
            shape, dtype = rows.shape, rows.dtype
    found = re.fullmatch(r".*: (\d+) tokens, rows \((\d+), (\d+)\) (\w+), mean (\S+)\n", printed)
    assert found, printed
    assert (int(found[1]), int(found[2]), int(found[3]), found[4]) == (image.tokens, *shape, dtype)
    assert float(found[5]) == pytest.approx(mean, abs=1e-5)
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    )
    assert (
        output_of(sys.executable, "-c", code, EXAMPLES / "fetch_rows.py", photos[0], process.endpoint)
        == printed
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "usage: "),
        (["nowhere.jpg"], "No such file or directory: 'nowhere.jpg'"),
        ([__file__], f"{__file__}: not an image of a supported format"),
    ],
)
def test_fetch_rows_says_what_is_wrong(process: ServerProcess, arguments: list[str], says: str) -> None:
    where = [process.endpoint] if arguments else []
    example = [sys.executable, EXAMPLES / "fetch_rows.py", *arguments, *where]
    done = subprocess.run(example, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (1 if arguments else 2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_prefill_runs_every_chunk_with_its_rows(
    process: ServerProcess,
    checkpoint: Path,
    photos: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [sys.executable, EXAMPLES / "prefill.py", "--model", checkpoint, "--server", process.endpoint]
    printed = output_of(*command, "--chunk-tokens", "37", *photos)
    chunks = re.findall(r"^tokens (\d+) to (\d+): waited \S+ ms for rows (.*)$", printed, re.MULTILINE)
    ends = [int(end) for _, end, _ in chunks]
    assert [int(begin) for begin, _, _ in chunks] == [0, *ends[:-1]]
    rows = sum(int(count) for _, _, rows in chunks for count in re.findall(r"(\d+) \w+", rows))
    assert rows == ends[-1] > 37
    assert re.search(r"^next token: \d+$", printed, re.MULTILINE)
    script, *arguments = map(str, [*command[1:], "--chunk-tokens", "64", *photos])
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(script, run_name="__main__")
    again = capsys.readouterr().out
    assert printed.splitlines()[-1] == again.splitlines()[-1], "the chunks do not change the answer"


def test_openai_chat_asks_the_reference_service(
    process: ServerProcess, checkpoint: Path, photos: list[Path]
) -> None:
    command = [SCRIPTS / "prefill-reference", "--model", checkpoint, "--encoder", process.endpoint]
    reference = LoggedProcess([*command, "--listen", "127.0.0.1:0"], {})
    try:
        url = f"http://{reference.wait_for_settings()['listening']}/v1"
        printed = output_of(sys.executable, EXAMPLES / "openai_chat.py", *photos, "--url", url)
    finally:
        reference.terminate()
    counts = [int(count) for count in re.findall(r", (\d+) prompt tokens$", printed, re.MULTILINE)]
    assert len(counts) == 2
    assert 0 < counts[0] < counts[1]


async def run_notebook(server: str, photos: Path) -> None:
    """Run the notebook's cells in order, as a kernel does, with other parameters."""
    book = json.loads((EXAMPLES / "timeline.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in (cell for cell in book["cells"] if cell["cell_type"] == "code"):
        assert cell["outputs"] == []
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", []):
            source += f"\nserver, photos, prefill_s = {server!r}, {str(photos)!r}, 0.01"
        running_cell = eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if running_cell is not None:
            await running_cell


async def test_the_notebook_draws_a_request_that_encodes_and_one_that_hits(
    process: ServerProcess, photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retry with other photos if a busy machine encodes an image before its rows are requested."""
    monkeypatch.chdir(tmp_path)
    for seed in range(1000, 1030, len(photos)):
        for place, path in enumerate(photos):
            path.write_bytes(photo(300, 200, seed + place))  # which no other test has sent
        await run_notebook(process.endpoint, photos[0].parent)
        first, again = (
            {event["name"] for event in json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]}
            for name in ("first", "again")
        )
        if "vit" in first:
            break
    assert {"submit", "upload", "vit", "prefill"} <= first
    assert "hit" in again
    assert "vit" not in again
    picture = (tmp_path / "timeline.svg").read_text()
    assert picture.startswith("<svg")
    assert all(name in picture for name in ("first", "again", "image 2", "chunk 0"))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(
    not (EXAMPLES / "node/node_modules").exists(), reason="npm install --prefix examples/node was not run"
)
def test_a_client_in_javascript_fetches_the_same_bytes(process: ServerProcess, photos: list[Path]) -> None:
    printed = output_of("node", EXAMPLES / "node/fetch_rows.js", photos[1], process.endpoint)
    with BlockingClient.connect(process.endpoint) as client:
        (image,) = client.submit([photos[1]])
        windows = [(0, image.tokens >> 1), (image.tokens >> 1, image.tokens)]
        with client.fetch([RowRequest(image.digest, *window) for window in windows]) as outcomes:
            rows = {outcome.index: outcome.array for outcome in outcomes}
    hashes = [blake3(rows[index].tobytes()).hexdigest() for index in range(2)]
    assert re.findall(r"checksum right, blake3 (\w+)$", printed, re.MULTILINE) == hashes
