"""The key of image names: from a variable, a file of the operator, or a file that the first process creates."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefill_client.vllm.name_key import VARIABLE, own_key_file, read_name_key


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of vLLM's, and no variable."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def test_processes_of_one_host_share_a_key_that_only_their_user_can_read() -> None:
    with ThreadPoolExecutor(16) as threads:
        keys = {each.result() for each in [threads.submit(read_name_key, "") for _ in range(64)]}
    assert len(keys) == 1
    assert len(keys.pop()) == 32
    assert stat.S_IMODE(own_key_file().stat().st_mode) == 0o600
    assert os.listdir(own_key_file().parent) == [own_key_file().name], "no other file is left"


def test_another_host_has_another_key(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    key = read_name_key("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root / "another"))
    assert read_name_key("") != key


def test_the_operators_file_and_variable_win(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    file = root / "key"
    file.write_text("a" * 64 + "\n")
    of_file = read_name_key(str(file))
    assert not own_key_file().exists()
    monkeypatch.setenv(VARIABLE, "a" * 64)
    assert read_name_key("") == of_file
    monkeypatch.setenv(VARIABLE, "b" * 64)
    assert read_name_key(str(file)) != of_file


def test_a_key_that_others_can_read_is_refused() -> None:
    read_name_key("")
    own_key_file().chmod(0o640)
    with pytest.raises(ValueError, match="other users can read the key"):
        read_name_key("")


def test_a_missing_or_short_key_is_refused_with_advice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"missing.*openssl rand -hex 32"):
        read_name_key(str(root / "missing"))
    (root / "short").write_text("secret")
    with pytest.raises(ValueError, match="at least 32 characters"):
        read_name_key(str(root / "short"))
    (root / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root / "file"))
    with pytest.raises(ValueError, match="name_key_file"):
        read_name_key("")
