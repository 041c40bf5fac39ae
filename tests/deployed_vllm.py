"""How deploy/ and docs/vllm.md start vLLM, read: by the tests of deploy/, and by those that have vLLM."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
PAGE = DEPLOY.parent / "docs/vllm.md"
SHARING = "vllm.md, engines that keep their tower"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "vllm/docker-compose.yml").read_text())
EXAMPLE = dict(
    line.split("=", 1)
    for line in (DEPLOY / "vllm/.env.example").read_text().splitlines()
    if line and not line.startswith("#")
)
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")
OVERLAYS = sorted((DEPLOY / "kubernetes/overlays").glob("vllm-*/kustomization.yaml"))
MANIFESTS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (DEPLOY / "kubernetes/vllm").glob("*.yaml")
}


def filled(value: object) -> str:
    """A value of the compose file with the example's variables, as compose fills them in."""
    return VARIABLE.sub(lambda match: EXAMPLE.get(match[1]) or match[2] or "", str(value))


def container() -> dict[str, Any]:
    """The container of the Kubernetes manifest."""
    (found,) = MANIFESTS["deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def served_name(overlay: Path) -> str:
    """What an overlay puts into the environment of that container."""
    (patch,) = yaml.safe_load(overlay.read_text())["patches"]
    (change,) = yaml.safe_load(patch["patch"])
    assert change["path"] == "/spec/template/spec/containers/0/env/0/value"
    assert container()["env"][0]["name"] == "SERVED_NAME"
    return str(change["value"])


def command_lines() -> dict[str, list[str]]:
    """The arguments of `vllm`, by the file that says them."""
    service = COMPOSE["services"]["vllm"]
    assert [service["entrypoint"], container()["command"]] == [["vllm"], ["vllm"]]
    found = {"docker-compose.yml": [filled(each) for each in service["command"]]}
    for overlay in OVERLAYS:
        name = served_name(overlay)
        found[overlay.parent.name] = [each.replace("$(SERVED_NAME)", name) for each in container()["args"]]
    consumer, sharing = re.findall(r"^vllm (serve .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, typed in ((PAGE.name, consumer), (SHARING, sharing)):
        found[name] = shlex.split(typed.replace("\\\n", " "))
    return found
