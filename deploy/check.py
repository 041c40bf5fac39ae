"""Checks what lies in deploy/ without an engine or a cluster: image, compose file, manifests, rules, dashboard."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
SCRIPTS = Path(sys.executable).parent
# The oldest release whose fields the manifests use (a preStop that sleeps), and the newest.
KUBERNETES = ("1.30.0", "")


def run(what: str, command: Sequence[str | Path], cwd: Path = DEPLOY) -> bool:
    """Run a check; print what it said only if it failed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{what}: failed\n{done.stdout}{done.stderr}", file=sys.stderr)
    return done.returncode == 0


def check_manifests() -> list[bool]:
    """Build every overlay where kubectl or kustomize is there, else check the base file by file."""
    if kubectl := shutil.which("kubectl"):
        build: list[str | Path] = [kubectl, "kustomize"]
    elif kustomize := shutil.which("kustomize"):
        build = [kustomize, "build"]
    else:
        print(
            "deploy: neither kubectl nor kustomize is installed: overlays are not built, only the base is checked"
        )
        files = sorted((DEPLOY / "kubernetes").glob("*/*.yaml"))
        return [_valid([path for path in files if path.name != "kustomization.yaml"])]
    good = []
    with tempfile.TemporaryDirectory() as folder:
        for overlay in sorted((DEPLOY / "kubernetes/overlays").iterdir()):
            built = Path(folder) / f"{overlay.name}.yaml"
            good.append(run(f"kustomize {overlay.name}", [*build, overlay, "--output", built]))
            good.append(good[-1] and _valid([built]))
    return good


def _valid(files: Sequence[Path]) -> bool:
    versions = (["-k", version] if version else [] for version in KUBERNETES)
    command = [SCRIPTS / "kubernetes-validate", "--strict", "--quiet"]
    checked = [run("kubernetes-validate", [*command, *version, *files]) for version in versions]
    return all(checked)


def check_rules() -> list[bool]:
    """Have promtool check configuration and rules, and play the alerts' cases, where it is installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        print(
            "deploy: promtool is not installed (Debian: apt install prometheus): alert cases are not played"
        )
        return []
    folder = DEPLOY / "prometheus"
    return [
        run("promtool check config", [promtool, "check", "config", "prometheus.yml"], folder),
        run("promtool test rules", [promtool, "test", "rules", "rules.test.yml"], folder),
    ]


def main() -> int:
    """Run every check; 1 when one failed."""
    schema = [SCRIPTS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    results = [
        run("hadolint", [SCRIPTS / "hadolint", "Dockerfile"]),
        run("compose schema", [*schema, "docker-compose.yml"]),
        run("dashboard", [sys.executable, "grafana/build.py", "--check"]),
        *check_manifests(),
        *check_rules(),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
