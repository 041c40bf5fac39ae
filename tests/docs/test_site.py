"""The documentation site: built strictly, with every public name of the client, and no link that leads nowhere."""

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
        assert (site.SITE / page / "index.html").exists(), page
    api = (site.SITE / "docs/api/index.html").read_text()
    for name in prefill_client.__all__:
        assert name.startswith("__") or f'id="prefill_client.{name}"' in api, name
    # A missing page and a missing anchor are both reported.
    (site.STAGE / "docs/store.md").write_text("[one](gone.md) and [two](overlap.md#gone)\n")
    broken = site.build()
    assert broken.returncode != 0
    for link in ("gone.md", "overlap.md#gone"):
        assert any("WARNING" in line and f"'{link}'" in line for line in broken.stderr.splitlines()), link
