"""Checks the files of deploy/ without Docker or a cluster: image, compose files, manifests, rules, dashboard."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template

DEPLOY = Path(__file__).resolve().parent
MANIFESTS = DEPLOY / "kubernetes"
COMPOSE = ("docker-compose.yml", "vllm/docker-compose.yml", "sglang/docker-compose.yml")
SCRIPTS = Path(sys.executable).parent
# The oldest release whose fields the manifests use (a preStop that sleeps), and the newest.
KUBERNETES = ("1.30.0", "")


def run(what: str, command: Sequence[str | Path], cwd: Path = DEPLOY) -> bool:
    """Run a check; print its output only if it failed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{what}: failed\n{done.stdout}{done.stderr}", file=sys.stderr)
    return done.returncode == 0


def check_compiler() -> bool:
    """Check that Triton can compile in the image for CUDA, and load the result from the folder that compose mounts."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    encoder = dockerfile.partition("\nFROM runtime AS encoder\n")[2].partition("\nFROM ")[0]
    folder = re.search(r"^ENV TRITON_CACHE_DIR=(\S+)$", encoder, re.MULTILINE)
    installs = re.search(r"apt-get install [^&]*\bgcc libc6-dev\b", encoder)
    mounts = re.findall(r'"(/[^:"]*):([^"]*)"', _service("encoder-gpu"))
    may_load = folder and any(path == folder[1] and "exec" in options.split(",") for path, options in mounts)
    if installs and may_load:
        return True
    print("deploy: Triton has no compiler in the image for CUDA, or no folder to load from", file=sys.stderr)
    return False


def _service(name: str) -> str:
    """Return the text of a service in the compose file."""
    text = (DEPLOY / "docker-compose.yml").read_text()
    return re.split(r"^  (?=\S)", text.partition(f"\n  {name}:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def check_manifests() -> list[bool]:
    """Build and check every overlay, and every component over one; without kubectl and kustomize, only the base."""
    build = kustomize()
    if build is None:
        print(
            "deploy: neither kubectl nor kustomize is installed: overlays are not built, only the base is checked"
        )
        files = sorted((MANIFESTS / "base").glob("*.yaml"))
        return [_valid([path for path in files if path.name != "kustomization.yaml"])]
    good = []
    with tempfile.TemporaryDirectory() as folder:
        overlays = sorted((MANIFESTS / "overlays").iterdir())
        overlays += [
            overlay_with([component.name], Path(folder) / component.name)
            for component in sorted((MANIFESTS / "components").iterdir())
        ]
        for number, overlay in enumerate(overlays):
            built = Path(folder) / f"{number}.yaml"
            good.append(run(f"kustomize {overlay.name}", [*build, overlay, "--output", built]))
            if good[-1]:
                built.write_text(of_kubernetes(built.read_text()))
            good.append(good[-1] and _valid([built]))
    return good


def kustomize() -> list[str | Path] | None:
    """Return the command that builds a folder of manifests, None where there is none."""
    if kubectl := shutil.which("kubectl"):
        return [kubectl, "kustomize"]
    found = shutil.which("kustomize")
    return [found, "build"] if found else None


def overlay_with(components: Sequence[str], folder: Path, overlay: str = "cpu") -> Path:
    """Write an overlay to `folder`: another one with these components; return the folder."""
    folder.mkdir()
    kubernetes = os.path.relpath(MANIFESTS.resolve(), folder.resolve())  # kustomize takes no other path
    named = ", ".join(f"{kubernetes}/components/{name}" for name in components)
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{kubernetes}/overlays/{overlay}]\ncomponents: [{named}]\n"
    )
    return folder


def of_kubernetes(manifests: str) -> str:
    """Return the manifests of Kubernetes's own kinds: without those of the Prometheus operator."""
    each = re.split(r"^---\n", manifests, flags=re.MULTILINE)
    return "---\n".join(one for one in each if not one.startswith("apiVersion: monitoring.coreos.com/"))


def _valid(files: Sequence[Path]) -> bool:
    versions = (["-k", version] if version else [] for version in KUBERNETES)
    command: list[str | Path] = [SCRIPTS / "kubernetes-validate", "--strict", "--quiet"]
    checked = [run("kubernetes-validate", [*command, *version, *files]) for version in versions]
    return all(checked)


def check_rules() -> list[bool]:
    """Have promtool, if it is installed, check configuration and rules, and run the test cases of the alerts."""
    promtool = shutil.which("promtool")
    if promtool is None:
        print(
            "deploy: promtool is not installed (Debian: apt install prometheus): alert cases are not played"
        )
        return []
    folder = DEPLOY / "prometheus"
    return [
        run("promtool check config", [promtool, "check", "config", "prometheus.yml", "vllm.yml"], folder),
        run("promtool test rules", [promtool, "test", "rules", "rules.test.yml"], folder),
    ]


def check_pins() -> bool:
    """Check that every pulled image is pinned to one release: three numbers or more in its tag."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    bases = [
        Template(base).substitute(arguments) for base in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    ]
    fetched = [base for base in bases if base not in stages]
    for path in COMPOSE:
        fetched += re.findall(r"^\s+image: (\S+)$", (DEPLOY / path).read_text(), re.MULTILINE)
    loose = [image for image in fetched if not is_pinned(image)]
    for image in loose:
        print(f"deploy: the image {image} is not pinned to one release", file=sys.stderr)
    return not loose


def is_pinned(image: str) -> bool:
    """Whether the name of an image is pinned to one release."""
    return bool(re.search(r":v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", image))


def main() -> int:
    """Run every check; 1 when one failed."""
    schema: list[str | Path] = [SCRIPTS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    results = [
        run("hadolint", [SCRIPTS / "hadolint", "Dockerfile"]),
        run("compose schema", [*schema, *COMPOSE]),
        run("dashboard", [sys.executable, "grafana/build.py", "--check"]),
        run("PrometheusRule", [sys.executable, "prometheus/operator.py", "--check"]),
        check_pins(),
        check_compiler(),
        *check_manifests(),
        *check_rules(),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
