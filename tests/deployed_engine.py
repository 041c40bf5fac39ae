"""How deploy/ starts an LLM engine beside the service, read."""

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
        # Those of deploy/docker-compose.yml that it has, too.
        self.extended = {name: each["extends"] for name, each in self.services.items() if "extends" in each}
        self.example = dict(
            line.split("=", 1)
            for line in (folder / ".env.example").read_text().splitlines()
            if line and not line.startswith("#")
        )
        self.manifests = {path.stem: yaml.safe_load(path.read_text()) for path in manifests.glob("*.yaml")}
        self.overlays = sorted((DEPLOY / "kubernetes/overlays").glob(f"{name}-*/kustomization.yaml"))

    def filled(self, value: object) -> str:
        """A value of the compose file with the example's variables, as compose fills them in."""
        return VARIABLE.sub(lambda match: self.example.get(match[1]) or match[2] or "", str(value))

    def environment(self, service: str, prefix: str = "") -> dict[str, str]:
        """The variables of a service in the compose file that begin with `prefix`."""
        given = self.services[service]["environment"]
        return {name: self.filled(value) for name, value in given.items() if name.startswith(prefix)}

    @property
    def pod(self) -> dict[str, Any]:
        """What the Kubernetes manifest says of its pod."""
        return dict(self.manifests["deployment"]["spec"]["template"]["spec"])

    @property
    def containers(self) -> dict[str, dict[str, Any]]:
        """The containers of the pod by name; the first is the engine's."""
        return {each["name"]: each for each in self.pod["containers"]}

    def served_name(self, overlay: Path) -> str:
        """What an overlay puts into the environment of the engine's container."""
        (patch,) = yaml.safe_load(overlay.read_text())["patches"]
        (change,) = yaml.safe_load(patch["patch"])
        assert change["path"] == "/spec/template/spec/containers/0/env/0/value"
        assert next(iter(self.containers.values()))["env"][0]["name"] == "SERVED_NAME"
        return str(change["value"])
