"""Checks the gateway for SGLang in deploy/ and docs/sglang.md."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from encoder_contract.version import __version__
from encoder_service.config import Config
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_client.sglang_gateway.frames import SUPPORTED
from tests.deploy.test_engine_deploy import SGLANG
from tests.deployed_engine import DEPLOY

PAGE = DEPLOY.parent / "docs/sglang.md"


def gateway_config(environment: dict[str, str]) -> GatewayConfig:
    """Read settings as the gateway does. A folder of this machine replaces the checkpoint's."""
    return GatewayConfig.read({}, environment | {"SGLANGSVC_LANGUAGE_MODEL": str(DEPLOY)})


def compose_gateway() -> GatewayConfig:
    return gateway_config(SGLANG.environment("gateway"))


def pod_gateway(values: Mapping[str, Any] | None = None) -> GatewayConfig:
    variables = SGLANG.containers(values)["gateway"]["env"]
    return gateway_config({each["name"]: each["value"] for each in variables})


def page_commands() -> dict[str, list[str]]:
    """Return the commands of the page by program."""
    page = PAGE.read_text().replace("\\\n", " ")
    lines = [
        shlex.split(line)
        for block in re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
        for line in block.splitlines()
        if "--" in line
    ]
    return {
        "gateway": next(line for line in lines if line[0] == "encoder-sglang-gateway"),
        "sglang": next(line for line in lines if "sglang.launch_server" in line and "--encoder-urls" in line),
    }


def sglang_lines() -> dict[str, list[str]]:
    """Return the arguments of SGLang by the file that has them; flags and values are separate words."""
    commands = {
        "compose": [SGLANG.filled(each) for each in SGLANG.services["sglang"]["command"]],
        "pod": SGLANG.containers()["sglang"]["args"],
        "page": page_commands()["sglang"],
    }
    return {name: [word for each in line for word in each.split("=", 1)] for name, line in commands.items()}


def test_the_gateway_finds_the_encoder_and_shares_the_loopback_of_sglang() -> None:
    config = Config.read({}, SGLANG.environment("encoder", "ENCSVC_"))
    assert compose_gateway().endpoints == [config.listen]
    assert SGLANG.services["gateway"]["network_mode"] == "service:sglang"


@pytest.mark.parametrize("where", ["compose", "pod", "page"])
def test_sglangs_flags_name_the_safe_back_end_and_the_gateways_virtual_encoders(where: str) -> None:
    line = sglang_lines()[where]
    assert "--language-only" in line
    assert line[line.index("--encoder-transfer-backend") + 1] == "zmq_to_tokenizer"
    urls = line[line.index("--encoder-urls") + 1 :]
    listen = {"compose": compose_gateway().listen, "pod": pod_gateway().listen}.get(where)
    if listen is None:
        gateway = page_commands()["gateway"]
        listen = gateway[gateway.index("--listen") + 1]
    assert urls == [f"http://{listen}/v{number}" for number in range(4)]


def test_rows_stay_on_the_loopback() -> None:
    environment = {each["name"]: each["value"] for each in SGLANG.containers()["sglang"]["env"]}
    assert environment["SGLANG_HOST_IP"] == SGLANG.environment("sglang")["SGLANG_HOST_IP"] == "127.0.0.1"
    assert "SGLANG_HOST_IP=127.0.0.1" in page_commands()["sglang"]
    for config in (compose_gateway(), pod_gateway()):
        assert config.receivers == "127.0.0.0/8,::1"
        assert config.listen.startswith("127.0.0.1:")


def test_the_page_and_the_manifests_name_releases_that_the_frames_are_tested_with() -> None:
    page = PAGE.read_text()
    assert re.search(
        rf"^\| releases of SGLang \| .* \| {SUPPORTED[0]} to {SUPPORTED[-1]} \|$", page, re.MULTILINE
    )
    images = {name: each["image"] for name, each in SGLANG.containers().items()}
    assert images == {
        "sglang": f"lmsysorg/sglang:v{SUPPORTED[-1]}",
        "gateway": f"encoder-service-sglang-gateway:{__version__}",
    }


def test_the_gateway_of_a_pod_with_tls_reads_the_files_of_its_secret() -> None:
    config = pod_gateway({"tls": {"enabled": True, "name": "encoder.example"}})
    assert config.access.tls_ca == "/etc/encoder/ca.crt"
    assert config.access.tls_name == "encoder.example"
    assert config.access.token_file == "/etc/encoder/token"
