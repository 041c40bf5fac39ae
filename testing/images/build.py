"""Builds the images of deploy/Dockerfile. Base images come from a registry, or are stand-ins of Debian packages.

`python -m testing.images.build` builds all and prints their sizes. With a registry, nothing here changes what is built.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from encoder_contract.version import __version__
from testing.images import engine

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
STAND_INS = Path(__file__).resolve().parent / "standin"
DEBIAN = "debian:bookworm-slim"
PULL_S = 20
BUILD_S = 3600
WHEELS = Path("/opt/wheels")  # wheels that pip prefers to an index which does not answer
WHEELS_PORT = 38999  # a layer's cache depends on it

TARGETS = {
    "encoder": f"encoder-service:{__version__}-cpu",
    "prefill": f"encoder-service-prefill:{__version__}-cpu",
    "sglang-gateway": f"encoder-service-sglang-gateway:{__version__}",
}
"""The targets that a machine without a GPU runs, with the names that compose gives them."""
CUDA = f"encoder-service:{__version__}-cuda"


def bases() -> dict[str, str]:
    """Return the images that the files of deploy/ take from a registry, by the stand-in's name."""
    found = {
        "python": "python:" + re.findall(r"^ARG PYTHON=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.M)[0]
    }
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    for name in ("redis", "prometheus", "alertmanager", "grafana"):
        found[name] = services[name]["image"]
    return found


def has_image(name: str) -> bool:
    """Whether the engine has this image."""
    try:
        engine.run("image", "inspect", name)
    except subprocess.CalledProcessError:
        return False
    return True


def fetch_bases() -> list[str]:
    """Pull the base images, or build stand-ins if no registry answers; return the names of the stand-ins."""
    stand_ins = []
    for stand_in, name in bases().items():
        if _is_stand_in(name) if has_image(name) else not _pull(name):
            _build_stand_in(stand_in, name)  # the engine builds only what has changed
            stand_ins.append(name)
    return stand_ins


def _is_stand_in(name: str) -> bool:
    labels = json.loads(engine.run("image", "inspect", "--format", "{{json .Config.Labels}}", name))
    return bool(labels and labels.get("stand-in"))


@functools.cache
def _registry_answers() -> bool:
    try:
        engine.run("pull", "--quiet", "hello-world:latest", limit_s=PULL_S)
    except subprocess.SubprocessError:
        return False
    return True


def _pull(name: str) -> bool:
    if _registry_answers():
        engine.run("pull", "--quiet", name)
        return True
    return False


def _build_stand_in(stand_in: str, name: str) -> None:
    if not has_image(DEBIAN):
        _import_debian()
    context = engine.FOLDER / "standin" / stand_in
    shutil.copytree(STAND_INS / stand_in, context, dirs_exist_ok=True)
    if stand_in == "python":
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", context)
        (context / "pip.conf").write_text(
            "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nretries = 0\ntimeout = 60\n"
            f"find-links = http://127.0.0.1:{WHEELS_PORT}/\nextra-index-url = https://pypi.org/simple\n"
        )
    command = ["build", "--network", "host", "--label", "stand-in=yes", "--tag", name]
    engine.run(*command, context, limit_s=BUILD_S)


def _import_debian() -> None:
    """Import a bare Debian, made of its packages."""
    root = engine.FOLDER / "bookworm"
    if not (root / "usr/bin/apt-get").exists() or (root / "debootstrap").exists():
        shutil.rmtree(root, ignore_errors=True)
        log = (engine.FOLDER / "debootstrap.log").open("w")
        command: list[str | Path] = [
            "debootstrap",
            "--variant=minbase",
            "bookworm",
            root,
            "http://deb.debian.org/debian",
        ]
        subprocess.run(command, check=True, stdout=log, stderr=log)
    left_out = [f"--exclude=./{name}/*" for name in ("proc", "sys", "dev", "var/cache/apt/archives")]
    packed = subprocess.Popen(["tar", "-C", root, *left_out, "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(
        [engine.docker(), "import", "-", DEBIAN],
        env=engine.environment(),
        stdin=packed.stdout,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    if packed.wait():
        raise RuntimeError("tar failed")


@contextmanager
def wheels() -> Iterator[None]:
    """Serve the machine's folder of wheels to builds, which use the host's network; do nothing without the folder."""
    if not WHEELS.is_dir():
        yield
        return
    handler = functools.partial(_QuietHandler, directory=str(WHEELS))
    with http.server.ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def build(target: str, tag: str, *options: str) -> None:
    """Build a target of the Dockerfile with the engine's cache."""
    command = ["build", "--network", "host", "--file", str(DEPLOY / "Dockerfile"), "--target", target]
    engine.run(*command, "--tag", tag, *options, ROOT, limit_s=BUILD_S)


def size_mb(image: str) -> float:
    """Return the size of an image, MB."""
    return int(engine.run("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def layers_mb(image: str) -> list[tuple[float, str]]:
    """Return the size, MB, and the command of each layer, the newest first."""
    lines = engine.run(
        "history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", image
    )
    return [(int(size) / 1e6, by) for size, by in (line.split("\t", 1) for line in lines.splitlines())]


def build_all() -> None:
    """Build every target that needs no GPU to run, and remove what earlier builds left."""
    fetch_bases()
    with wheels():
        for target, tag in TARGETS.items():
            build(target, tag, *(() if target == "sglang-gateway" else ("--build-arg", "TORCH=cpu")))
    engine.run("image", "prune", "--force")


def build_cuda() -> None:
    """Build the encoder for CUDA 13, of gigabytes. The machine's own wheels, for CPUs, are not served to it."""
    fetch_bases()
    build("encoder", CUDA, "--build-arg", "TORCH=cu130")
    engine.run("image", "prune", "--force")


if __name__ == "__main__":
    engine.start()
    build_all()
    for image in TARGETS.values():
        print(f"{image}: {size_mb(image):,.0f} MB")
        for size, by in layers_mb(image):
            if size > 1:
                print(f"  {size:8,.1f} MB  {by[:110]}")
    sys.exit(0)
