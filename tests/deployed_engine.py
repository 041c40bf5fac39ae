"""Reads how deploy/ starts the service, and an LLM engine beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy import charts

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")


class ComposeFile:
    """A folder's compose file, with its example of variables."""

    def __init__(self, folder: Path) -> None:
        self.text = (folder / "docker-compose.yml").read_text()
        self.compose: dict[str, Any] = yaml.safe_load(self.text)
        self.services: dict[str, dict[str, Any]] = self.compose["services"]
        self.example = dict(
            line.split("=", 1)
            for line in (folder / ".env.example").read_text().splitlines()
            if line and not line.startswith("#")
        )

    def filled(self, value: object, **changes: str) -> str:
        """Return a value with the example's variables, and `changes`, filled in, as compose does."""
        variables = {**self.example, **changes}
        return VARIABLE.sub(lambda match: variables.get(match[1]) or match[2] or "", str(value))

    def environment(self, service: str, prefix: str = "") -> dict[str, str]:
        """Return the variables of a service that begin with `prefix`."""
        given = self.services[service]["environment"]
        return {name: self.filled(value) for name, value in given.items() if name.startswith(prefix)}


class DeployedEngine(ComposeFile):
    """The compose file and the chart of one engine."""

    def __init__(self, name: str) -> None:
        super().__init__(DEPLOY / name)
        self.name = name
        # Services that are taken from deploy/docker-compose.yml.
        self.extended = {name: each["extends"] for name, each in self.services.items() if "extends" in each}

    def pod(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the specification of its pod in Kubernetes, by default for a model that is served as `chat`."""
        deployment = charts.render(self.name, {"servedName": "chat", **(values or {})})[
            "Deployment", self.name
        ]
        return dict(deployment["spec"]["template"]["spec"])

    def containers(self, values: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        """Return the containers of the pod by name; the first is the engine's."""
        return {each["name"]: each for each in self.pod(values)["containers"]}
