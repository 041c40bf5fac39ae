"""Checks what deploy/ has for every LLM engine beside the service."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from bench.sizing import memory_gib
from deploy import charts
from encoder_contract.version import __version__
from encoder_service.config import Config
from prefill_client.sglang_gateway.frames import SUPPORTED
from tests.deploy.test_deploy import PROCESSES_GIB, gib
from tests.deploy.test_deploy import SERVICES as OTHER
from tests.deployed_engine import DEPLOY, VARIABLE, DeployedEngine
from tests.deployed_vllm import VLLM

SGLANG = DeployedEngine("sglang")
ENGINES = pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
READERS = {"vllm": "vllm", "sglang": "gateway"}
"""The service of each compose file that reads rows in the encoder's shared memory."""
RELEASED = (f":{__version__}", f":{__version__}-cuda", f":{__version__}-cpu", f":v{SUPPORTED[-1]}")


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
    assert memory_gib(config, on_gpu=True) + PROCESSES_GIB["cuda"] < limit


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
def test_pods_find_the_encoders_service(engine: DeployedEngine) -> None:
    (found,) = {*re.findall(r"dns:([\w.-]+:\d+)", yaml.safe_dump(engine.pod(), width=10_000))}
    service, namespace, port = re.fullmatch(r"([\w-]+)\.([\w-]+)\.svc:(\d+)", found).groups()  # type: ignore[union-attr]
    headless = charts.render("encoder-service")["Service", service]
    assert namespace == headless["metadata"]["namespace"]
    assert headless["spec"]["clusterIP"] == "None"
    assert int(port) in [each["port"] for each in headless["spec"]["ports"]]


@ENGINES
def test_the_label_that_the_notes_give_the_namespace_lets_its_pods_call(engine: DeployedEngine) -> None:
    policy = charts.render("encoder-service")["NetworkPolicy", "encoder"]
    allowed = policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    notes = (DEPLOY / "helm" / engine.name / "templates/NOTES.txt").read_text()
    assert allowed
    assert all(f" {label}={value} " in notes for label, value in allowed.items())


@ENGINES
def test_a_pod_is_locked_down_and_leaves_a_dead_node(engine: DeployedEngine) -> None:
    pod = engine.pod()
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert {each["tolerationSeconds"] for each in pod["tolerations"] if "tolerationSeconds" in each} == {30}
    assert next(iter(engine.containers())) == engine.name
    for container in engine.containers().values():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert {"startupProbe", "livenessProbe"} <= set(container)


@ENGINES
def test_a_model_needs_a_name_in_requests(engine: DeployedEngine) -> None:
    with pytest.raises(charts.ChartError, match="servedName"):
        charts.render(engine.name)


@ENGINES
def test_every_mounted_secret_is_a_volume_of_the_pod(engine: DeployedEngine) -> None:
    pod = engine.pod({"tls": {"enabled": True, "secret": "mine"}})
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["encoder"]["secret"]["secretName"] == "mine"
    readers = [
        each["name"]
        for each in pod["containers"]
        if any(mount["name"] == "encoder" for mount in each["volumeMounts"])
    ]
    assert readers == [READERS[engine.name]], "who speaks to the encoders"
