"""vLLM's own parser accepts the arguments in deploy/ and docs/vllm.md, and our settings accept their JSON."""

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

from prefill_client.vllm.cache_manager import EncoderServiceCacheManager
from prefill_client.vllm.connector import EncoderServiceConnector
from prefill_client.vllm.middleware import EncoderServiceMiddleware
from prefill_client.vllm.vllm_settings import VllmSettings
from tests.deployed_vllm import PAGE, command_lines, render_arguments

LINES = command_lines()


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """The parser of `vllm serve`."""
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


@pytest.mark.parametrize("file", LINES)
def test_vllm_parses_deployed_arguments_and_finds_our_classes(
    file: str, parser: Any, checkpoint: Path
) -> None:
    command, model, *arguments = LINES[file]
    assert (command, model) in {("serve", "/model"), ("serve", "FOLDER")}
    parsed = parser.parse_args(arguments)
    assert all(name and "$" not in name for name in parsed.served_model_name or ())
    parsed.model = str(checkpoint)
    config = EngineArgs.from_cli_args(parsed).create_engine_config()
    with_tower = config.model_config.multimodal_config.get_limit_per_prompt("image") > 0
    assert with_tower == (file == PAGE.name)
    transfer, manager = config.ec_transfer_config, config.ec_manager_config
    assert ECConnectorFactory.get_connector_class(transfer) is EncoderServiceConnector
    assert VllmSettings.read(transfer.ec_connector_extra_config).endpoints
    assert transfer.ec_role == "ec_consumer"
    assert [resolve_obj_by_qualname(each) for each in parsed.middleware] == [EncoderServiceMiddleware]
    assert resolve_obj_by_qualname(manager.encoder_cache_manager_cls) is EncoderServiceCacheManager


def test_vllm_parses_the_arguments_of_render_servers(parser: Any, checkpoint: Path) -> None:
    command, component, model, *arguments = render_arguments()
    assert (command, component, model) == ("launch", "render", "/model")
    parsed = parser.parse_args(arguments)
    parsed.model = str(checkpoint)
    config = EngineArgs.from_cli_args(parsed).create_model_config()
    assert config.multimodal_config.get_limit_per_prompt("image") > 0, "else it has no processor of images"
    settings = VllmSettings.read(parsed.ec_transfer_config.ec_connector_extra_config)
    assert settings.endpoints
    assert [resolve_obj_by_qualname(each) for each in parsed.middleware] == [EncoderServiceMiddleware]


def test_unknown_vllm_flags_are_detected(parser: Any) -> None:
    _, *arguments = LINES["docker-compose.yml"]
    with pytest.raises(SystemExit):
        parser.parse_args([*arguments, "--ec-manager=x"])
