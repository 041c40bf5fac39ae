"""Checks the files in deploy/: settings that the programs know, bounds that fit, names that exist."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from bench.sizing import memory_gib
from encoder_contract.command_line import BAD_USAGE
from encoder_contract.version import __version__
from encoder_service.config import Config, ConfigError
from encoder_service.devices import EXIT_LOST
from prefill_reference.config import ServiceConfig
from tests.deployed_engine import DEPLOY, VARIABLE, ComposeFile
from tests.pages import ROOT

MAIN = ComposeFile(DEPLOY)
SERVICES = MAIN.services
PROCESSES_GIB = {"cpu": 1, "cuda": 2}  # of a small model


def gib(size: str) -> float:
    """Return a size such as `2304m` or `17Gi` in GiB."""
    number, unit = re.fullmatch(r"([\d.]+)([a-zA-Z]+)", size).groups()  # type: ignore[union-attr]
    return float(number) * {"m": 1 / 1024, "g": 1, "mi": 1 / 1024, "gi": 1}[unit.lower()]


# The compose file


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened_bounded_watched_and_pinned(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["logging"]["options"]["max-size"]
    assert re.search(r":v?\d+\.\d+", service["image"]), "pinned to a version"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "this machine only"


@pytest.mark.parametrize("name", ["encoder-cpu", "encoder-gpu"])
def test_the_encoders_environment_is_a_valid_configuration(name: str) -> None:
    config = Config.read({}, MAIN.environment(name))
    assert config.index.startswith("redis://redis:")
    assert config.metrics_listen.endswith(":9464")
    assert config.devices == {"encoder-cpu": "cpu", "encoder-gpu": "cuda"}[name]
    assert config.store_host_gib < gib(MAIN.filled(SERVICES[name]["shm_size"]))
    assert gib(MAIN.filled(SERVICES[name]["shm_size"])) < gib(MAIN.filled(SERVICES[name]["mem_limit"]))
    least = memory_gib(config, on_gpu=config.devices == "cuda")
    assert gib(MAIN.filled(SERVICES[name]["mem_limit"])) > least + PROCESSES_GIB[config.devices]
    assert config.drain_s < float(SERVICES[name]["stop_grace_period"].rstrip("s"))


def test_the_prefill_services_environment_is_a_valid_configuration() -> None:
    config = ServiceConfig.read({}, MAIN.environment("prefill", "PREFILLSVC_"))
    assert config.encoder == "dns:encoder:50051", "all replicas, not the first"
    assert "encoder" in SERVICES["encoder-cpu"]["networks"]["default"]["aliases"]


def test_the_example_sets_exactly_the_variables_in_use() -> None:
    text = re.sub(r"^\s*#.*$", "", MAIN.text, flags=re.M)
    used = {match[1] for match in VARIABLE.finditer(text)}
    assert used | {"COMPOSE_PROFILES"} == set(MAIN.example)
    assert MAIN.example["COMPOSE_PROFILES"] in SERVICES["encoder-cpu"]["profiles"]


def test_every_mounted_file_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind" and volume["source"].startswith("."):
                assert (DEPLOY / volume["source"]).exists(), volume


def test_every_scrape_target_is_a_listening_service() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    networks = [service.get("networks", {}) for service in SERVICES.values()]
    aliases = {alias for each in networks for alias in each.get("default", {}).get("aliases", [])}
    listens = {"encoder": MAIN.environment("encoder-cpu")["ENCSVC_METRICS_LISTEN"]}
    for job in jobs:
        (found,) = job["dns_sd_configs"]
        assert set(found["names"]) <= aliases | set(SERVICES)
        assert listens[job["job_name"]] == f"0.0.0.0:{found['port']}"


def test_the_image_installs_existing_extras_and_runs_unprivileged() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'\.\[([\w,-]+)\]'|extras=([\w,-]+)", dockerfile)
    installed = {extra for pair in named for group in pair for extra in group.split(",") if extra}
    assert installed == {"gpu", "server", "video", "dali-cuda12", "reference", "sglang-gateway", "vllm"}
    assert installed <= set(extras)
    assert re.search(r"^USER \d+:\d+$", dockerfile, re.M)
    targets = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert targets == {"encoder", "prefill"} <= set(re.findall(r"^FROM .* AS (\w+)$", dockerfile, re.M))
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY ((?:[\w.]+ )+)", dockerfile, re.M)
    assert {name for names in copied for name in names.split()} == kept


def stages() -> dict[str, str]:
    """Return the lines of each stage of the Dockerfile."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    return dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", dockerfile, re.M | re.S))


def test_code_and_dependencies_are_layers_of_their_own_and_images_have_labels() -> None:
    for name in ("encoder", "prefill", "sglang-gateway"):
        assert "COPY encoder_service" not in stages()[f"{name}-dependencies"]
        copies = re.findall(r"^COPY --from=(\S+) (\S+)", stages()[name], re.M)
        assert copies == [
            (f"{name}-dependencies", "/opt/venv"),
            ("app", "/opt/app"),
            (f"{name}-bom", "/opt/bom.json"),
        ]
    for name in ("encoder", "prefill", "sglang-gateway", "vllm"):
        labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', stages()[name]))
        assert labels.keys() == {"title", "description", "licenses", "version"}
        assert labels["version"] == __version__


def test_the_dockerfile_needs_no_syntax_from_a_registry() -> None:
    assert not re.search(r"^#\s*syntax\s*=", (DEPLOY / "Dockerfile").read_text(), re.M)


def test_metadata_built_without_sources_has_our_version_and_extras(tmp_path: Path) -> None:
    """The image installs dependencies from this metadata before it copies the sources."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "proto/encoder_contract/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    code = (
        "from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare; print(prepare('.'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    metadata = (tmp_path / done.stdout.splitlines()[-1] / "METADATA").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"Version: {__version__}\n" in metadata
    assert all(f"Provides-Extra: {extra}\n" in metadata for extra in extras)


@pytest.mark.parametrize(
    ("torch", "extras"),
    [("cpu", "server,video"), ("cu128", "server,video,dali-cuda12"), ("cu130", "gpu,video")],
)
@pytest.mark.cuda
def test_each_variant_of_the_encoder_has_its_decoder_and_attention(torch: str, extras: str) -> None:
    """Runs the step of the Dockerfile with a pip that only prints its arguments."""
    (step,) = re.findall(r"^RUN (case .*)", stages()["encoder-dependencies"], re.M | re.S)
    ran = subprocess.run(
        ["sh", "-ec", f'pip() {{ echo "$@"; }}\npython() {{ :; }}\n{step}'],
        env={**os.environ, "TORCH": torch},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f" .[{extras}]\n" in ran.stdout


def test_a_misspelt_setting_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="ENCSVC_STORE_GIB is not a setting"):
        Config.read({}, {**MAIN.environment("encoder-cpu"), "ENCSVC_STORE_GIB": "2"})


@pytest.mark.cuda
def test_every_gpu_deployment_may_use_the_hardware_jpeg_decoder() -> None:
    wanted = "compute,utility,video"
    assert f"NVIDIA_DRIVER_CAPABILITIES={wanted}\n" in (DEPLOY / "Dockerfile").read_text()
    assert MAIN.environment("encoder-gpu")["NVIDIA_DRIVER_CAPABILITIES"] == wanted


# The operator's page


def test_the_operators_page_names_the_exit_codes() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert f"code {EXIT_LOST}" in page
    assert f"exit code {BAD_USAGE}" in page
