"""Reads how deploy/ starts an LLM engine beside the service."""

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")


class DeployedEngine:
    """The compose file with its example of variables, the manifests, and the overlays of one engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder, manifests = DEPLOY / name, DEPLOY / "kubernetes" / name
        self.text = (folder / "docker-compose.yml").read_text()
        self.compose: dict[str, Any] = yaml.safe_load(self.text)
        self.services: dict[str, dict[str, Any]] = self.compose["services"]
        # Services that are taken from deploy/docker-compose.yml.
        self.extended = {name: each["extends"] for name, each in self.services.items() if "extends" in each}
        self.example = dict(
            line.split("=", 1)
            for line in (folder / ".env.example").read_text().splitlines()
            if line and not line.startswith("#")
        )
        self.manifests = {path.stem: yaml.safe_load(path.read_text()) for path in manifests.glob("*.yaml")}
        self.overlays = sorted((DEPLOY / "kubernetes/overlays").glob(f"{name}-*/kustomization.yaml"))

    def filled(self, value: object) -> str:
        """Return a value of the compose file with the example's variables filled in."""
        return VARIABLE.sub(lambda match: self.example.get(match[1]) or match[2] or "", str(value))

    def environment(self, service: str, prefix: str = "") -> dict[str, str]:
        """Return the variables of a service in the compose file that begin with `prefix`."""
        given = self.services[service]["environment"]
        return {name: self.filled(value) for name, value in given.items() if name.startswith(prefix)}

    @property
    def pod(self) -> dict[str, Any]:
        """The specification of its pod in Kubernetes."""
        return dict(self.manifests["deployment"]["spec"]["template"]["spec"])

    @property
    def containers(self) -> dict[str, dict[str, Any]]:
        """The containers of the pod by name; the first is the engine's."""
        return {each["name"]: each for each in self.pod["containers"]}

    def served_name(self, overlay: Path) -> str:
        """Return the name under which an overlay serves the model."""
        (patch,) = yaml.safe_load(overlay.read_text())["patches"]
        (change,) = yaml.safe_load(patch["patch"])
        assert change["path"] == "/spec/template/spec/containers/0/env/0/value"
        assert next(iter(self.containers.values()))["env"][0]["name"] == "SERVED_NAME"
        return str(change["value"])
