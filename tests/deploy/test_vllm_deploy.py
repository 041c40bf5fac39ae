"""What deploy/ promises of vLLM beside the service, read; that its arguments are vLLM's, tests/vllm asks vLLM."""

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from encoder_contract.version import __version__
from encoder_service.config import Config
from tests.deploy.test_deploy import ROOT, gib, manifests
from tests.deploy.test_deploy import SERVICES as OTHER
from tests.deployed_vllm import (
    COMPOSE,
    DEPLOY,
    EXAMPLE,
    MANIFESTS,
    OVERLAYS,
    VARIABLE,
    command_lines,
    container,
    filled,
    served_name,
)

SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def endpoints(arguments: list[str]) -> str:
    (transfer,) = (each for each in arguments if each.startswith("--ec-transfer-config="))
    extra = json.loads(transfer.partition("=")[2])["ec_connector_extra_config"]
    return str(extra["endpoints"])


@pytest.mark.parametrize("name", SERVICES)
def test_both_services_are_hardened_bounded_watched_and_pinned(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["image"].endswith((f":{__version__}", f":{__version__}-cuda"))
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "this machine only"
    targets = re.findall(r"^FROM .* AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert service["build"]["target"] in targets


def test_the_encoder_listens_where_the_engine_looks_for_it() -> None:
    config = Config.read(
        {}, {k: filled(v) for k, v in SERVICES["encoder"]["environment"].items() if k.startswith("ENCSVC_")}
    )
    assert config.listen == endpoints(command_lines()["docker-compose.yml"])
    folder = config.listen.removeprefix("unix:").rpartition("/")[0]
    for service in SERVICES.values():
        assert {"type": "volume", "source": "socket", "target": folder} in service["volumes"]
    assert config.store_host_gib < gib(filled(SERVICES["encoder"]["shm_size"]))
    assert gib(filled(SERVICES["encoder"]["shm_size"])) < gib(filled(SERVICES["encoder"]["mem_limit"]))


def test_the_encoders_kernels_may_be_loaded_as_in_the_other_compose_file() -> None:
    assert SERVICES["encoder"]["tmpfs"] == OTHER["encoder-gpu"]["tmpfs"]


def test_both_are_one_user_with_one_shared_memory_and_one_checkpoint() -> None:
    encoder, vllm = SERVICES["encoder"], SERVICES["vllm"]
    assert encoder["user"] == vllm["user"]
    assert (encoder["ipc"], vllm["ipc"]) == ("shareable", "service:encoder")
    assert encoder["volumes"][0] == vllm["volumes"][0]
    owner = f"uid={encoder['user'].partition(':')[0]},"
    assert owner in COMPOSE["volumes"]["socket"]["driver_opts"]["o"]


def test_the_example_sets_every_variable_and_no_other() -> None:
    text = re.sub(r"^\s*#.*$", "", (DEPLOY / "vllm/docker-compose.yml").read_text(), flags=re.M)
    assert {match[1] for match in VARIABLE.finditer(text)} == set(EXAMPLE)


def test_pods_find_and_may_call_the_encoders_service() -> None:
    (found,) = {endpoints(each) for name, each in command_lines().items() if name.startswith("vllm-")}
    service, namespace, _, port = re.fullmatch(r"dns:([\w-]+)\.([\w-]+)\.(svc):(\d+)", found).groups()  # type: ignore[union-attr]
    base = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    assert namespace == base["namespace"]
    (headless,) = (
        each for each in manifests() if each["kind"] == "Service" and each["metadata"]["name"] == service
    )
    assert headless["spec"]["clusterIP"] == "None"
    assert int(port) in [each["port"] for each in headless["spec"]["ports"]]
    (policy,) = (each for each in manifests() if each["kind"] == "NetworkPolicy")
    allowed = policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    assert allowed.items() <= MANIFESTS["namespace"]["metadata"]["labels"].items()


def test_there_is_an_overlay_for_each_family_and_its_pod_is_locked_down() -> None:
    assert [served_name(overlay) for overlay in OVERLAYS] == [
        "Qwen2.5-VL-7B-Instruct",
        "Qwen3-VL-8B-Instruct",
        "Qwen3.5",
    ]
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container())


def test_compose_and_pods_differ_only_in_endpoints_and_machine_settings() -> None:
    def flags(arguments: list[str]) -> dict[str, str]:
        return dict(each.lstrip("-").partition("=")[::2] for each in arguments if each.startswith("--"))

    lines = command_lines()
    compose, pod = flags(lines["docker-compose.yml"]), flags(lines["vllm-qwen3-vl-8b"])
    differing = {name for name in compose.keys() | pod.keys() if compose.get(name) != pod.get(name)}
    assert differing == {"ec-transfer-config", "gpu-memory-utilization"}


def test_the_image_has_a_vllm_that_the_extra_admits() -> None:
    (release,) = re.findall(r"^ARG VLLM=v([\d.]+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "vllm"
    ]
    lowest, highest = re.fullmatch(r"vllm>=([\d.]+),<([\d.]+)", extra).groups()  # type: ignore[union-attr]

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(".")]

    assert numbers(lowest) <= numbers(release) < numbers(highest)
