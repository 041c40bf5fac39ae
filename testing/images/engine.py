"""Installs a Docker engine (Debian, as root), starts it with a data folder of its own, and stops it.

`python -m testing.images.engine install` installs Debian's packages and compose. `start` starts the engine and prints
the variables for a shell, `stop` stops it. The folder is IMAGES_FOLDER, by default ~/.cache/encoder-service/images. It
keeps layers between runs.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(os.environ.get("IMAGES_FOLDER", Path.home() / ".cache/encoder-service/images"))
# The proxies are for tests/encoder_service/test_proxies.py.
PACKAGES = ("docker.io", "iptables", "debootstrap", "haproxy", "nginx-light")
# Bookworm's compose is too old. Trixie's is one static program.
COMPOSE = "https://deb.debian.org/debian/pool/main/d/docker-compose/docker-compose_2.26.1-4_amd64.deb"
COMPOSE_SHA256 = "47681197cb2b1ab88206b42a1a92fc75f50d9530a6322d03494a473eed0408ea"
PLUGIN = "usr/libexec/docker/cli-plugins/docker-compose"
START_S = 60


class UnavailableEngineError(Exception):
    """The machine cannot run the engine. The text says what is missing."""


def docker() -> str:
    """Return Debian's client, which has BuildKit; newer clients need a plugin to build."""
    found = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else shutil.which("docker")
    if found is None or shutil.which("dockerd") is None or not (FOLDER / "compose" / PLUGIN).exists():
        raise UnavailableEngineError("no Docker engine: run python -m testing.images.engine install")
    return found


def environment() -> dict[str, str]:
    """Return the environment in which `docker` uses this engine."""
    return os.environ | {
        "DOCKER_HOST": f"unix://{FOLDER}/docker.sock",
        "DOCKER_CONFIG": str(FOLDER / "config"),
        "DOCKER_BUILDKIT": "1",
    }


def install() -> None:
    """Install the packages of the engine, and compose, which no package of this Debian has. Starts no service."""
    if os.geteuid() or shutil.which("apt-get") is None:
        raise UnavailableEngineError("a Docker engine can be installed only by root, on Debian 12")
    missing = [
        name for name in PACKAGES if subprocess.run(["dpkg", "-s", name], capture_output=True).returncode
    ]
    if missing:
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        subprocess.run(["apt-get", "-qq", "update"], env=quiet, check=True)
        command = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing]
        subprocess.run(command, env=quiet, check=True, stdout=subprocess.DEVNULL)
    if not (FOLDER / "compose" / PLUGIN).exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(COMPOSE, timeout=60) as answer:
            package = answer.read()
        if hashlib.sha256(package).hexdigest() != COMPOSE_SHA256:
            raise UnavailableEngineError(f"{COMPOSE} has other contents than the tests were written with")
        (FOLDER / "compose.deb").write_bytes(package)
        subprocess.run(["dpkg", "-x", FOLDER / "compose.deb", FOLDER / "compose"], check=True)
    plugins = FOLDER / "config/cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "docker-compose").unlink(missing_ok=True)
    (plugins / "docker-compose").symlink_to(FOLDER / "compose" / PLUGIN)


def run(
    *command: str | Path,
    folder: Path | None = None,
    more: Mapping[str, str] | None = None,
    limit_s: float = 600,
) -> str:
    """Run `docker`; return what it printed. Raises `CalledProcessError`, with the output as a note."""
    done = subprocess.run(
        [docker(), *command],
        cwd=folder,
        env=environment() | dict(more or {}),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(f"{done.stdout[-4000:]}{done.stderr[-8000:]}")
        raise error
    return done.stdout


def is_running() -> bool:
    """Whether this engine answers."""
    try:
        run("version", limit_s=10)
    except (subprocess.SubprocessError, UnavailableEngineError):
        return False
    return True


def start() -> None:
    """Start the engine, unless it runs. Raises `UnavailableEngineError` with the end of its log."""
    client = docker()
    if is_running():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        "dockerd",
        "--host",
        environment()["DOCKER_HOST"],
        "--data-root",
        FOLDER / "data",
    ]
    command += ["--exec-root", FOLDER / "exec", "--pidfile", FOLDER / "docker.pid"]
    with (FOLDER / "dockerd.log").open("w") as log:
        subprocess.Popen(
            [*command, "--exec-opt", "native.cgroupdriver=cgroupfs"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + START_S
    while not is_running():
        if time.monotonic() > until:
            end = (FOLDER / "dockerd.log").read_text()[-2000:]
            raise UnavailableEngineError(f"{client} does not reach the engine that was started:\n{end}")
        time.sleep(0.5)


def stop() -> None:
    """Stop the engine, with all its containers, and undo its rule against forwarding."""
    try:
        process = int((FOLDER / "docker.pid").read_text())
        os.kill(process, signal.SIGTERM)
    except (OSError, ValueError):
        return
    until = time.monotonic() + START_S
    while (FOLDER / "docker.pid").exists() and time.monotonic() < until:
        time.sleep(0.2)
    subprocess.run(["iptables", "-P", "FORWARD", "ACCEPT"], check=False)


def main(arguments: Sequence[str] = sys.argv[1:]) -> int:
    """Install, start or stop the engine."""
    try:
        for argument in arguments:
            {"install": install, "start": start, "stop": stop}[argument]()
    except UnavailableEngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if "start" in arguments:
        for name in ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_BUILDKIT"):
            print(f"export {name}={environment()[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
