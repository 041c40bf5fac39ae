"""Checks vLLM beside the service in deploy/. tests/vllm checks that vLLM accepts its arguments."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy import charts
from encoder_service.config import Config
from prefill_client.vllm.vllm_settings import VllmSettings
from testing.certificates import Authority
from tests.deploy.test_deploy import MAIN
from tests.deployed_engine import DEPLOY
from tests.deployed_vllm import VLLM, command_lines, render_arguments


def endpoints(arguments: list[str]) -> str:
    (transfer,) = (each for each in arguments if each.startswith("--ec-transfer-config="))
    extra = json.loads(transfer.partition("=")[2])["ec_connector_extra_config"]
    return str(extra["endpoints"])


def test_the_encoder_listens_where_the_engine_connects() -> None:
    config = Config.read({}, VLLM.environment("encoder", "ENCSVC_"))
    assert config.listen == endpoints(command_lines()["docker-compose.yml"])
    assert VLLM.services["encoder"]["volumes"][0] == VLLM.services["vllm"]["volumes"][0], "one checkpoint"


def test_the_monitoring_services_extend_the_main_compose_file_and_scrape_both() -> None:
    names = ("prometheus", "alertmanager", "grafana")
    assert VLLM.extended == {name: {"file": "../docker-compose.yml", "service": name} for name in names}
    (config,) = (
        each.partition("=")[2].replace("/etc/prometheus", str(DEPLOY / "prometheus"))
        for each in VLLM.services["prometheus"]["command"]
        if each.startswith("--config.file=")
    )
    jobs = yaml.safe_load(Path(config).read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    port = VLLM.environment("encoder")["ENCSVC_METRICS_LISTEN"].removeprefix("0.0.0.0:")
    assert targets["encoder"] == [f"encoder:{port}"]
    assert targets["vllm"] == [f"vllm:{VLLM.services['vllm']['ports'][0].rpartition(':')[2]}"]
    needed = {each["source"] for name in names for each in MAIN.services[name]["volumes"]}
    assert len(needed & set(MAIN.compose["volumes"])) == 2
    assert needed & set(MAIN.compose["volumes"]) <= VLLM.compose["volumes"].keys()


def flags(arguments: list[str]) -> dict[str, str]:
    """Return the flags of a command line; JSON without spaces."""
    found = dict(each.lstrip("-").partition("=")[::2] for each in arguments if each.startswith("--"))
    return {name: _packed(value) for name, value in found.items()}


def _packed(value: str) -> str:
    return json.dumps(json.loads(value), sort_keys=True) if value.startswith("{") else value


def test_compose_and_pods_differ_only_in_endpoints_and_machine_settings() -> None:
    """The parser of vLLM checks those of compose (tests/vllm/test_deployed.py)."""
    container = VLLM.containers({"servedName": VLLM.example["SERVED_NAME"]})["vllm"]
    assert container["command"] == ["vllm"]
    compose, pod = flags(command_lines()["docker-compose.yml"]), flags(container["args"])
    differing = {name for name in compose.keys() | pod.keys() if compose.get(name) != pod.get(name)}
    assert differing == {"ec-transfer-config", "gpu-memory-utilization"}
    ours, theirs = (json.loads(each["ec-transfer-config"]) for each in (compose, pod))
    assert theirs["ec_connector_extra_config"].pop("endpoints").startswith("dns:")
    ours["ec_connector_extra_config"].pop("endpoints")
    assert ours == theirs


@pytest.mark.parametrize("own_tower", [False, True])
def test_a_value_says_whether_the_engine_loads_its_tower(own_tower: bool) -> None:
    arguments = flags(VLLM.containers({"ownTower": own_tower})["vllm"]["args"])
    assert ("limit-mm-per-prompt" in arguments) is not own_tower


RENDER = {"render": {"replicas": 1}, "nameKeySecret": "vllm-name-key"}
ONLY_ENGINES = {
    *("ec-manager-config", "gpu-memory-utilization", "enable-scale-out", "no-enable-scale-out"),
    "limit-mm-per-prompt",  # with no image, a render server has no processor of images, and ends
}


def test_render_servers_have_the_arguments_and_the_key_of_the_engines_and_no_gpu() -> None:
    compose = VLLM.services["render"]
    assert "deploy" not in compose
    assert compose["environment"]["ENCODER_SERVICE_NAME_KEY"] == "${NAME_KEY:-}"
    assert VLLM.services["vllm"]["environment"]["ENCODER_SERVICE_NAME_KEY"] == "${NAME_KEY:-}"
    assert compose["volumes"] == VLLM.services["vllm"]["volumes"]
    assert render_arguments()[:3] == ["launch", "render", "/model"]
    engine = flags(command_lines()["docker-compose.yml"])
    assert flags(render_arguments()) == {name: engine[name] for name in engine.keys() - ONLY_ENGINES}
    values = {"servedName": "chat", **RENDER}
    rendered = charts.render("vllm", values)
    (pod,) = rendered["Deployment", "vllm-render"]["spec"]["template"]["spec"]["containers"]
    (serving,) = VLLM.containers(values).values()
    engine = flags(serving["args"])
    assert flags(pod["args"]) == {name: engine[name] for name in engine.keys() - ONLY_ENGINES}
    assert "enable-scale-out" in engine
    assert pod["env"] == serving["env"]
    assert "nvidia.com/gpu" not in pod["resources"]["limits"]
    selector = rendered["Service", "vllm"]["spec"]["selector"]
    labels = rendered["Deployment", "vllm-render"]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items(), "requests for engines must not go to render servers"


def test_only_scores_is_a_setting_of_render_servers_alone() -> None:
    rendered = charts.render(
        "vllm", {"servedName": "chat", **RENDER, "render": {"replicas": 1, "scoresOnly": True}}
    )
    for name, expected in (("vllm", False), ("vllm-render", True)):
        (pod,) = rendered["Deployment", name]["spec"]["template"]["spec"]["containers"]
        extra = json.loads(flags(pod["args"])["ec-transfer-config"])["ec_connector_extra_config"]
        assert VllmSettings.read(extra).scores_only is expected


def test_a_render_server_without_the_key_of_its_engines_is_refused() -> None:
    with pytest.raises(charts.ChartError, match="need one key"):
        charts.render("vllm", {"servedName": "chat", "render": {"replicas": 1}})


def test_a_pod_with_tls_gives_the_connector_settings_that_it_knows(tmp_path: Path) -> None:
    authority = Authority()
    authority.write(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("of the engine")
    for name, issued in zip(("tls.crt", "tls.key"), authority.issue(tmp_path, "client"), strict=True):
        Path(issued).rename(tmp_path / name)
    arguments = VLLM.containers({"tls": {"enabled": True}})["vllm"]["args"]
    extra = json.loads(flags(arguments)["ec-transfer-config"])["ec_connector_extra_config"]
    here = {name: value.replace("/etc/encoder/", f"{tmp_path}/") for name, value in extra.items()}
    credentials = VllmSettings.read(here).credentials
    assert credentials.ca == str(tmp_path / "ca.crt")
    assert credentials.server_name == "encoder.encoder.svc"
    assert credentials.token_file == str(tmp_path / "token")


def test_the_images_vllm_is_in_the_range_of_the_extra() -> None:
    (release,) = re.findall(r"^ARG VLLM=v([\d.]+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    (extra,) = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["vllm"]
    lowest, highest = re.fullmatch(r"vllm>=([\d.]+),<([\d.]+)", extra).groups()  # type: ignore[union-attr]

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(".")]

    assert numbers(lowest) <= numbers(release) < numbers(highest)


def test_the_values_for_llm_d_start_our_render_server() -> None:
    values = yaml.safe_load((DEPLOY / "llm-d/router-values.yaml").read_text())["router"]
    sidecar, scores = values["tokenizer"], {"replicas": 1, "scoresOnly": True}
    model = "Qwen3-VL-8B-Instruct"
    rendered = charts.render("vllm", {"servedName": model, **RENDER, "render": scores})
    pod = rendered["Deployment", "vllm-render"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert flags(sidecar["extraArgs"]) == flags(container["args"])
    assert sidecar["modelName"] == container["args"][2]
    assert container["image"].endswith(f"{sidecar['image']['repository']}:{sidecar['image']['tag']}")
    assert [each for each in container["env"] if "valueFrom" in each] == sidecar["env"]
    assert sidecar["volumeMounts"][0] in container["volumeMounts"]
    assert sidecar["volumes"][0] in pod["volumes"]
    plugins = yaml.safe_load(values["epp"]["pluginsCustomConfig"][values["epp"]["pluginsConfigFile"]])
    (producer,) = (each for each in plugins["plugins"] if each["type"] == "token-producer")
    assert producer["parameters"]["modelName"] == model, "the picker stamps it into what it renders"


def test_the_coordinators_pipeline_calls_our_render_server_and_no_encoder_of_vllm() -> None:
    pipeline = yaml.safe_load((DEPLOY / "llm-d/coordinator.yaml").read_text())["pipeline"]
    rendered = charts.render("vllm", {"servedName": "chat", **RENDER})
    service = rendered["Service", "vllm-render"]
    namespace, (port,) = service["metadata"]["namespace"], service["spec"]["ports"]
    by_type = {step["type"]: step.get("params", {}) for step in pipeline["steps"]}
    assert list(by_type) == ["replace-media-urls", "render", "prefill", "decode"]
    assert by_type["render"]["address"] == f"http://vllm-render.{namespace}.svc:{port['port']}"
    assert pipeline["use_openai_format"] is True
