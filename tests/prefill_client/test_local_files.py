"""Files that requests name by file:// URLs: only those of the allowed folder."""

import os
from pathlib import Path

import pytest

from encoder_contract.errors import EncoderError, ForbiddenError, InvalidRequestError
from prefill_client.vllm.local_files import read_local


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file and a link out of it, beside another file."""
    folder = tmp_path / "allowed folder"
    folder.mkdir()
    (folder / "a photo.png").write_bytes(b"12345")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_file_of_the_folder_is_read(folder: Path) -> None:
    for url in (
        f"file://{folder}/a photo.png",
        (folder / "a photo.png").as_uri(),
        f"FILE://{folder}/a%20photo.png",
    ):
        assert read_local(url, str(folder), 5) == b"12345"


@pytest.mark.parametrize("path", ["/../secret", "/link", "", "/..", "/%2e%2e/secret"])
def test_files_outside_of_the_folder_are_refused(folder: Path, path: str) -> None:
    with pytest.raises(ForbiddenError, match="allowed-local-media-path"):
        read_local(f"file://{folder}{path}", str(folder), 100)


def test_without_the_flag_no_file_is_read(folder: Path) -> None:
    with pytest.raises(ForbiddenError, match="file:// URLs need --allowed-local-media-path"):
        read_local((folder / "a photo.png").as_uri(), "", 100)


@pytest.mark.parametrize("path", ["/missing", "/pipe", "/a%00b", "/a photo.png"])
def test_what_cannot_be_read_is_the_callers_error(folder: Path, path: str) -> None:
    with pytest.raises(EncoderError) as refused:
        read_local(f"file://{folder}{path}", str(folder), 4)
    assert isinstance(refused.value, InvalidRequestError)
