"""The documentation site: built strictly, with every public name of the client, and no link that leads nowhere."""

import dataclasses
import html
import re

import pytest

import prefill_client
from docs import site

pytest.importorskip("mkdocs", reason="the documentation tools are not installed: make setup")
pytestmark = pytest.mark.process


def test_the_site_has_every_page_and_name_and_refuses_a_broken_link() -> None:
    site.stage()
    built = site.build()
    assert built.returncode == 0, built.stderr
    pages = {page.relative_to(site.STAGE).with_suffix("") for page in site.STAGE.rglob("*.md")}
    for page in pages - {page for page in pages if page.name == "README"}:
        assert (site.SITE / page).with_suffix(".html").exists(), page
    api = (site.SITE / "docs/api.html").read_text()
    for name in prefill_client.__all__:
        assert name.startswith("__") or f'id="prefill_client.{name}"' in api, name
    fields = {field.name for field in dataclasses.fields(prefill_client.FetchedRows)}
    assert {name for name in fields if f'id="prefill_client.FetchedRows.{name}"' in api} == fields
    assert api.index('id="prefill_client.EncoderClient"') < api.index('id="prefill_client.AbandonedError"')
    assert html.escape(repr(prefill_client.TRANSPORTS), quote=False) in api
    # It works when it is opened from its folder: links lead to files, and nothing is loaded from another host.
    for page in site.SITE.rglob("*.html"):
        text = page.read_text()
        assert not re.search(
            r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* rel="stylesheet"[^>]*"https?:', text
        )
        assert 'class="mermaid"' not in text, f"{page}: the browser would load a library"
        for target in (
            set(re.findall(r'<a [^>]*href="([^"#:]+)[#"]', text)) if page.name != "404.html" else ()
        ):
            assert (page.parent / html.unescape(target)).is_file(), f"{page}: {target}"
    assert (site.SITE / "search/search_index.json").exists()
    # A missing page and a missing anchor are both reported. Without the other pages this is a second's work.
    for page in site.STAGE.rglob("*.md"):
        if page.name != "sizing.md":
            page.unlink()
    (site.STAGE / "docs/store.md").write_text("[one](gone.md) and [two](sizing.md#gone)\n")
    broken = site.build()
    assert broken.returncode != 0
    for link in ("gone.md", "sizing.md#gone"):
        assert any("WARNING" in line and f"'{link}'" in line for line in broken.stderr.splitlines()), link
