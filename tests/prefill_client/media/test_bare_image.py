"""Images that callers of SGLang send without a scheme: base64 is taken, and a path is named as one."""

import base64

import pytest

from encoder_contract.errors import ForbiddenError
from prefill_client.media.bare_image import as_url, is_path
from testing.photos import photo


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_bare_base64_of_an_image_becomes_a_data_url(kind: str) -> None:
    text = base64.b64encode(photo(60, 40, 1, kind)).decode()
    assert as_url(text, "image 0") == f"data:;base64,{text}"


@pytest.mark.parametrize(
    "source", ["/etc/hostname", "/tmp/a/b", "~/a", "./a", "../a", "photos/a.jpg", "a.png", "FILE:///a"]
)
def test_a_path_is_refused_as_a_path(source: str) -> None:
    assert is_path(source)
    with pytest.raises(ForbiddenError, match="image 3 is a path, and no files are read"):
        as_url(source, "image 3")


@pytest.mark.parametrize("url", ["http://host/a.jpg", "https://host/a", "data:image/png;base64,aaaa"])
def test_a_url_stays_as_it_is(url: str) -> None:
    assert as_url(url, "image 0") == url
