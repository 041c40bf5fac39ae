"""What deploy/ and docs/sglang.md promise of the gateway for SGLang, read."""

import re
import shlex
from typing import Any

import pytest
import yaml

from encoder_contract.version import __version__
from encoder_service.config import Config
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_client.sglang_gateway.frames import SUPPORTED
from tests.deploy.test_deploy import ROOT, gib, manifests
from tests.deploy.test_deploy import SERVICES as OTHER

DEPLOY = ROOT / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "sglang/docker-compose.yml").read_text())[
    "services"
]
EXAMPLE = dict(
    line.split("=", 1)
    for line in (DEPLOY / "sglang/.env.example").read_text().splitlines()
    if line and not line.startswith("#")
)
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")
MANIFESTS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (DEPLOY / "kubernetes/sglang").glob("*.yaml")
}
OVERLAYS = sorted((DEPLOY / "kubernetes/overlays").glob("sglang-*/kustomization.yaml"))


def filled(value: object) -> str:
    return VARIABLE.sub(lambda match: EXAMPLE.get(match[1]) or match[2] or "", str(value))


def containers() -> dict[str, dict[str, Any]]:
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    return {each["name"]: each for each in pod["containers"]}


def gateway_config(environment: dict[str, str]) -> GatewayConfig:
    """Read settings as the gateway would; the checkpoint is where this machine has a folder."""
    return GatewayConfig.read({}, environment | {"SGLANGSVC_LANGUAGE_MODEL": str(ROOT)})


def compose_gateway() -> GatewayConfig:
    return gateway_config({name: filled(value) for name, value in SERVICES["gateway"]["environment"].items()})


def pod_gateway() -> GatewayConfig:
    return gateway_config({each["name"]: each["value"] for each in containers()["gateway"]["env"]})


def typed() -> dict[str, list[str]]:
    """The commands of the page, by program."""
    page = (ROOT / "docs/sglang.md").read_text().replace("\\\n", " ")
    lines = [
        shlex.split(line)
        for block in re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
        for line in block.splitlines()
        if "--" in line
    ]
    return {
        "gateway": next(line for line in lines if line[:2] == ["prefill-client", "sglang-gateway"]),
        "sglang": next(line for line in lines if "sglang.launch_server" in line and "--encoder-urls" in line),
    }


def sglang_lines() -> dict[str, list[str]]:
    """The arguments of SGLang, by where they are said, a flag and its value apart."""
    said = {
        "compose": [filled(each) for each in SERVICES["sglang"]["command"]],
        "pod": containers()["sglang"]["args"],
        "page": typed()["sglang"],
    }
    return {name: [word for each in line for word in each.split("=", 1)] for name, line in said.items()}


@pytest.mark.parametrize("name", SERVICES)
def test_all_services_are_hardened_bounded_watched_and_pinned(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    released = (f":{__version__}", f":{__version__}-cuda", f":v{SUPPORTED[-1]}")
    assert service["image"].endswith(released)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "this machine only"
    targets = re.findall(r"^FROM .* AS ([\w-]+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert "build" not in service or service["build"]["target"] in targets


def test_the_gateway_finds_the_encoder_reads_its_memory_and_shares_the_loopback_of_sglang() -> None:
    encoder, gateway = SERVICES["encoder"], SERVICES["gateway"]
    environment = {k: filled(v) for k, v in encoder["environment"].items() if k.startswith("ENCSVC_")}
    config = Config.read({}, environment)
    assert compose_gateway().endpoints == [config.listen]
    folder = config.listen.removeprefix("unix:").rpartition("/")[0]
    for service in (encoder, gateway):
        assert {"type": "volume", "source": "socket", "target": folder} in service["volumes"]
    assert encoder["user"] == gateway["user"]
    assert (encoder["ipc"], gateway["ipc"]) == ("shareable", "service:encoder")
    assert gateway["network_mode"] == "service:sglang"
    assert encoder["tmpfs"] == OTHER["encoder-gpu"]["tmpfs"]
    assert config.store_host_gib < gib(filled(encoder["shm_size"])) < gib(filled(encoder["mem_limit"]))


def test_the_example_sets_every_variable_and_no_other() -> None:
    text = re.sub(r"^\s*#.*$", "", (DEPLOY / "sglang/docker-compose.yml").read_text(), flags=re.M)
    assert {match[1] for match in VARIABLE.finditer(text)} == set(EXAMPLE)


@pytest.mark.parametrize("where", ["compose", "pod", "page"])
def test_sglang_is_told_the_safe_back_end_and_virtual_encoders_of_the_gateway(where: str) -> None:
    line = sglang_lines()[where]
    assert "--language-only" in line
    assert line[line.index("--encoder-transfer-backend") + 1] == "zmq_to_tokenizer"
    urls = line[line.index("--encoder-urls") + 1 :]
    listen = {"compose": compose_gateway().listen, "pod": pod_gateway().listen}.get(where)
    if listen is None:
        gateway = typed()["gateway"]
        listen = gateway[gateway.index("--listen") + 1]
    assert urls == [f"http://{listen}/v{number}" for number in range(4)]


def test_rows_stay_on_the_loopback() -> None:
    environment = {each["name"]: each["value"] for each in containers()["sglang"]["env"]}
    assert environment["SGLANG_HOST_IP"] == SERVICES["sglang"]["environment"]["SGLANG_HOST_IP"] == "127.0.0.1"
    assert "SGLANG_HOST_IP=127.0.0.1" in typed()["sglang"]
    for config in (compose_gateway(), pod_gateway()):
        assert config.receivers == "127.0.0.0/8,::1"
        assert config.listen.startswith("127.0.0.1:")


def test_the_pods_gateway_looks_for_the_encoders_by_a_service_that_exists_and_may_call_them() -> None:
    (found,) = pod_gateway().endpoints
    service, namespace, port = re.fullmatch(r"dns:([\w-]+)\.([\w-]+)\.svc:(\d+)", found).groups()  # type: ignore[union-attr]
    base = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    assert namespace == base["namespace"]
    (headless,) = (
        each for each in manifests() if each["kind"] == "Service" and each["metadata"]["name"] == service
    )
    assert int(port) in [each["port"] for each in headless["spec"]["ports"]]
    (policy,) = (each for each in manifests() if each["kind"] == "NetworkPolicy")
    allowed = policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    assert allowed.items() <= MANIFESTS["namespace"]["metadata"]["labels"].items()


def test_overlays_name_their_model_and_the_pod_is_locked_down() -> None:
    names = []
    for overlay in OVERLAYS:
        (patch,) = yaml.safe_load(overlay.read_text())["patches"]
        (change,) = yaml.safe_load(patch["patch"])
        assert change["path"] == "/spec/template/spec/containers/0/env/0/value"
        names.append(change["value"])
    assert names == ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"]
    assert next(iter(containers())) == "sglang"
    assert containers()["sglang"]["env"][0]["name"] == "SERVED_NAME"
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    for container in containers().values():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert {"startupProbe", "livenessProbe"} <= set(container)


def test_the_page_and_the_manifests_name_releases_that_the_frames_are_tested_with() -> None:
    page = (ROOT / "docs/sglang.md").read_text()
    assert f"Releases {SUPPORTED[0]} to {SUPPORTED[-1]} of SGLang are supported." in page
    images = {each["name"]: each["newTag"] for each in MANIFESTS["kustomization"]["images"]}
    assert images == {"encoder-service-sglang-gateway": __version__, "sglang": f"v{SUPPORTED[-1]}"}
