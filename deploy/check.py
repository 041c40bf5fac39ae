"""Checks the files of deploy/ without Docker or a cluster: image, compose files, charts, rules, dashboard."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import kubernetes_validate

from deploy import charts

DEPLOY = Path(__file__).resolve().parent
COMPOSE = ("docker-compose.yml", "vllm/docker-compose.yml", "sglang/docker-compose.yml")
SCRIPTS = Path(sys.executable).parent
# The oldest release that has a preStop that sleeps, one between, and the newest with a known schema.
KUBERNETES = ("1.30", "1.33", "1.37")


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


def check_charts() -> list[bool]:
    """Render every chart with each of its examples, and check the manifests against the schemas of Kubernetes."""
    return [
        _is_valid(f"{chart}, {name}", manifest, version)
        for chart in charts.names()
        for name, values in charts.examples(chart)
        for manifest in charts.render(chart, values).values()
        if is_of_kubernetes(manifest)
        for version in KUBERNETES
    ]


def _is_valid(where: str, manifest: Mapping[str, Any], version: str) -> bool:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        print(f"{where}: {manifest['kind']} for Kubernetes {version}: {error.message}", file=sys.stderr)
        return False
    return True


def is_of_kubernetes(manifest: Mapping[str, Any]) -> bool:
    """Whether the manifest is of a kind that Kubernetes itself has, not the Prometheus operator or KEDA."""
    return not str(manifest["apiVersion"]).startswith(("monitoring.coreos.com/", "keda.sh/"))


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


def check_routes() -> list[bool]:
    """Have amtool, if it is installed, check the configuration of Alertmanager."""
    amtool = shutil.which("amtool")
    if amtool is None:
        print("deploy: amtool is not installed (Debian: apt install prometheus-alertmanager)")
        return []
    return [run("amtool check-config", [amtool, "check-config", "alertmanager.yml"], DEPLOY / "prometheus")]


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
        *check_charts(),
        *check_rules(),
        *check_routes(),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
