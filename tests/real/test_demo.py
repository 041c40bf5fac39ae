"""`make demo REAL=1`: a picture of what rows know."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from demo import real
from testing.real_weights import missing

pytestmark = [pytest.mark.real, pytest.mark.process]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_three_panels_of_each_photo_and_a_timeline(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    assert real.demo(tmp_path) == 0
    picture = ElementTree.parse(tmp_path / "real.svg").getroot()
    assert len(picture.findall(f"{SVG}image")) == len(real.PANELS) * len(real.SHOWN) == 9
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {*real.PANELS, "tower", *(f"image {number}" for number in range(3))} <= {*texts}
