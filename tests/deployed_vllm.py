"""Reads how deploy/ and docs/vllm.md start vLLM, for the tests of deploy/ and of vLLM."""

import re
import shlex

from tests.deployed_engine import DEPLOY, DeployedEngine

PAGE = DEPLOY.parent / "docs/vllm.md"
VLLM = DeployedEngine("vllm")


def command_lines() -> dict[str, list[str]]:
    """Return the arguments of `vllm serve`, by the file that has them."""
    service = VLLM.services["vllm"]
    assert service["entrypoint"] == VLLM.services["render"]["entrypoint"] == ["vllm"]
    found = {"docker-compose.yml": [VLLM.filled(each) for each in service["command"]]}
    (typed,) = re.findall(r"^vllm (serve .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found[PAGE.name] = shlex.split(typed.replace("\\\n", " "))
    return found


def render_arguments() -> list[str]:
    """Return the arguments of `vllm launch render` in the compose file."""
    return [VLLM.filled(each) for each in VLLM.services["render"]["command"]]
