"""Checks what deploy/ has for every LLM engine beside the service."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from encoder_contract.version import __version__
from encoder_service.config import Config
from prefill_client.sglang_gateway.frames import SUPPORTED
from tests.deploy.test_deploy import SERVICES as OTHER
from tests.deploy.test_deploy import gib, manifests
from tests.deployed_engine import DEPLOY, VARIABLE, DeployedEngine
from tests.deployed_vllm import VLLM

SGLANG = DeployedEngine("sglang")
ENGINES = pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
READERS = {"vllm": "vllm", "sglang": "gateway"}
"""The service of each compose file that reads rows in the encoder's shared memory."""
RELEASED = (f":{__version__}", f":{__version__}-cuda", f":v{SUPPORTED[-1]}")


def services() -> Iterator[Any]:
    for engine in (VLLM, SGLANG):
        for name in sorted(engine.services.keys() - engine.extended):
            service = engine.services[name]
            yield pytest.param(service, id=f"{engine.name}-{name}")


@pytest.mark.parametrize("service", [*services()])
def test_a_service_is_hardened_bounded_watched_and_pinned(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["image"].endswith(RELEASED)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "this machine only"
    targets = re.findall(r"^FROM .* AS ([\w-]+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    if service["image"].endswith(RELEASED[:2]):
        assert service["build"]["target"] in targets


@ENGINES
def test_the_reader_of_rows_shares_the_encoders_socket_memory_and_user(engine: DeployedEngine) -> None:
    encoder, reader = engine.services["encoder"], engine.services[READERS[engine.name]]
    config = Config.read({}, engine.environment("encoder", "ENCSVC_"))
    folder = config.listen.removeprefix("unix:").rpartition("/")[0]
    for service in (encoder, reader):
        assert {"type": "volume", "source": "socket", "target": folder} in service["volumes"]
    assert encoder["user"] == reader["user"]
    holds = "namespaces" if "namespaces" in engine.services else "encoder"
    holder = engine.services[holds]
    assert (holder["ipc"], reader["ipc"]) == ("shareable", f"service:{holds}")
    owner = f"uid={encoder['user'].partition(':')[0]},"
    assert owner in engine.compose["volumes"]["socket"]["driver_opts"]["o"]
    assert encoder["tmpfs"] == OTHER["encoder-gpu"]["tmpfs"], "its kernels may be loaded"
    shm, limit = (gib(engine.filled(text)) for text in (holder["shm_size"], encoder["mem_limit"]))
    assert config.store_host_gib < shm < limit


def test_the_namespaces_of_vllm_and_its_encoder_outlive_both() -> None:
    for name in ("encoder", "vllm"):
        service = VLLM.services[name]
        assert service["ipc"] == service["pid"] == "service:namespaces"  # CUDA asks for both
    assert VLLM.services["namespaces"]["init"], "it reaps orphaned processes"


@ENGINES
def test_the_example_sets_exactly_the_variables_in_use(engine: DeployedEngine) -> None:
    text = re.sub(r"^\s*#.*$", "", engine.text, flags=re.M)
    text += "".join(str(OTHER[name]) for name in engine.extended)
    assert {match[1] for match in VARIABLE.finditer(text)} == set(engine.example)


@ENGINES
def test_pods_find_and_may_call_the_encoders_service(engine: DeployedEngine) -> None:
    text = yaml.safe_dump(engine.manifests["deployment"], width=10_000)
    (found,) = {*re.findall(r"dns:([\w.-]+:\d+)", text)}
    service, namespace, port = re.fullmatch(r"([\w-]+)\.([\w-]+)\.svc:(\d+)", found).groups()  # type: ignore[union-attr]
    base = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())
    assert namespace == base["namespace"]
    (headless,) = (
        each for each in manifests() if each["kind"] == "Service" and each["metadata"]["name"] == service
    )
    assert headless["spec"]["clusterIP"] == "None"
    assert int(port) in [each["port"] for each in headless["spec"]["ports"]]
    (policy,) = (each for each in manifests() if each["kind"] == "NetworkPolicy")
    allowed = policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    assert allowed.items() <= engine.manifests["namespace"]["metadata"]["labels"].items()


@ENGINES
def test_each_family_has_an_overlay_and_its_pod_is_locked_down(engine: DeployedEngine) -> None:
    served = {
        "vllm": ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct", "Qwen3.5"],
        "sglang": ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"],
    }
    assert [engine.served_name(overlay) for overlay in engine.overlays] == served[engine.name]
    assert engine.pod["securityContext"]["runAsNonRoot"]
    assert next(iter(engine.containers)) == engine.name
    for container in engine.containers.values():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert {"startupProbe", "livenessProbe"} <= set(container)
