"""Files that requests name by file:// URLs: only those of the allowed folder."""

import os
from pathlib import Path

import pytest

from encoder_contract.errors import EncoderError, ForbiddenError, InvalidImageError, InvalidRequestError
from prefill_client.media.bare_image import as_url
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_client.media.local_files import LocalFolder

OPTION = "--allowed-local-media-path"


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
        assert LocalFolder(str(folder), OPTION).read(url, 5) == b"12345"


@pytest.mark.parametrize("path", ["/../secret", "/link", "", "/..", "/%2e%2e/secret"])
def test_files_outside_of_the_folder_are_refused(folder: Path, path: str) -> None:
    with pytest.raises(ForbiddenError, match="allowed-local-media-path"):
        LocalFolder(str(folder), OPTION).read(f"file://{folder}{path}", 100)


def test_without_the_flag_no_file_is_read(folder: Path) -> None:
    with pytest.raises(ForbiddenError, match="file:// URLs need --allowed-local-media-path"):
        LocalFolder("", OPTION).read((folder / "a photo.png").as_uri(), 100)


@pytest.mark.parametrize("path", ["/missing", "/pipe", "/a%00b", "/a photo.png"])
def test_what_cannot_be_read_is_the_callers_error(folder: Path, path: str) -> None:
    with pytest.raises(EncoderError) as refused:
        LocalFolder(str(folder), OPTION).read(f"file://{folder}{path}", 4)
    assert isinstance(refused.value, InvalidRequestError)


@pytest.mark.parametrize("url", ["file://[", "file://]/a"])
def test_what_is_no_url_is_the_callers_error(folder: Path, url: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a file URL"):
        LocalFolder(str(folder), OPTION).read(url, 100)


async def test_a_file_named_many_times_is_read_once(folder: Path) -> None:
    files = LocalFolder(str(folder), OPTION)
    loader = ImageLoader(Destinations(()), max_bytes=3 << 12, timeout_s=30, files=files)
    url, data = (folder / "a photo.png").as_uri(), "data:;base64," + "QUFB" * (1 << 12)
    first, inline, again, inline_again = await loader.load_all([url, data, url[:5] + url[5:], data])
    assert (first, inline) == (b"12345", b"AAA" * (1 << 12))
    assert again is first
    assert inline_again is inline


async def test_sources_of_every_kind_are_loaded_in_order(folder: Path) -> None:
    """The number in an error counts every source, also those that need no download."""
    files = LocalFolder(str(folder), OPTION)
    loader = ImageLoader(Destinations(()), max_bytes=9, timeout_s=30, files=files)
    relative = as_url("a photo.png", "image 1", reads_files=True)
    assert await loader.load_all([b"bytes", relative, "data:;base64,QUFB"]) == [b"bytes", b"12345", b"AAA"]
    link = f"file://{folder}/link"
    with pytest.raises(ForbiddenError, match=f"image 2: {folder}/link is not in the folder of") as refused:
        await loader.load_all([b"bytes", relative, link, link])
    assert refused.value.image == 2, "the first of several"


async def test_a_loader_without_files_takes_no_file_url(folder: Path) -> None:
    loader = ImageLoader(Destinations(()), max_bytes=9, timeout_s=30)
    with pytest.raises(InvalidImageError, match="image 0: an image URL must be a data:, http: or https: URL"):
        await loader.load_all([(folder / "a photo.png").as_uri()])
