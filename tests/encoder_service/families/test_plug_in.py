"""The plug-in in examples/plug_in, installed beside the server as a third party would do it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoder_service.families import check
from prefill_client import BlockingClient, RowRequest
from testing.photos import photo, pixels
from testing.server_process import running
from tests.waiting import PATIENCE_S

PLUG_IN = Path(__file__).parents[3] / "examples" / "plug_in"
MAX_LINES = 60


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a folder in which the plug-in is installed as by pip."""
    folder = tmp_path / "site"
    information = folder / "plain_vl-1.dist-info"
    information.mkdir(parents=True)
    shutil.copy(PLUG_IN / "plain_vl.py", folder)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-vl\nVersion: 1\n")
    ((group, points),) = tomllib.loads((PLUG_IN / "pyproject.toml").read_text())["project"][
        "entry-points"
    ].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


@pytest.fixture
def plain(tmp_path):
    """Write the checkpoint of the example; return the folder, and the weights."""
    subprocess.run([sys.executable, PLUG_IN / "checkpoint.py"], cwd=tmp_path, check=True)
    folder = tmp_path / "model"
    return folder, load_file(folder / "model.safetensors")["projector.weight"]


def test_a_plug_in_is_one_short_file():
    assert len((PLUG_IN / "plain_vl.py").read_text().splitlines()) <= MAX_LINES


def test_the_plug_in_serves_rows(installed, plain):
    folder, weight = plain
    with (
        running(folder, devices="cpu", store_host_gib=0.05) as server,
        BlockingClient.connect(server.endpoint, timeout_s=PATIENCE_S) as client,
    ):
        assert client.description.model_type == "plain_vl"
        good, tiny = client.submit([photo(224, 224, 1, "PNG"), photo(12, 300, 2)])
        assert (good.tokens, good.error) == (196, None)
        assert "both sides must have at least 16 pixels" in str(tiny.error)
        (outcome,) = client.fetch([RowRequest(good.digest)], timeout_s=PATIENCE_S)
        rows = torch.from_numpy(np.array(outcome.array))
    blocks = torch.from_numpy(pixels(224, 224, 1)).float().view(14, 16, 14, 16, 3).permute(0, 2, 4, 1, 3)
    assert torch.allclose(rows, (blocks.reshape(196, 768) / 127.5 - 1) @ weight.T, atol=1e-5)


def test_the_parity_kit_takes_plug_ins(installed, plain, monkeypatch, capsys):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "plain_vl", raising=False)
    assert check.main([str(plain[0]), "--sizes", "5"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["-", "ok", "ok", "ok"]


def test_without_the_plug_in_the_model_is_not_served(plain, capsys):
    assert check.main([str(plain[0])]) == 2
    assert "model_type 'plain_vl' has no vision part" in capsys.readouterr().err
