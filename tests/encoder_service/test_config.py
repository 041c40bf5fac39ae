"""The configuration: each field is a flag, an environment variable, a default and a help line."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from encoder_contract.settings import knob
from encoder_service.config import Config, ConfigError, flag
from encoder_service.vision.attention import BACKENDS
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_reference.config import ServiceConfig


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    Config.add_flags(parser)
    return vars(parser.parse_args(arguments))


def help_text() -> str:
    parser = argparse.ArgumentParser()
    Config.add_flags(parser)
    return "".join(parser.format_help().split())  # lines are also broken at hyphens


def test_every_field_is_a_flag_with_a_help_line_and_an_environment_name() -> None:
    text = help_text()
    for field in fields(Config):
        assert flag(field.name) in text
        assert Config.environment_name(field.name) in text
        assert "".join(field.metadata["help"].split()) in text


def test_every_heading_of_the_help_stands_before_a_field() -> None:
    assert set(Config.headings) <= {field.name for field in fields(Config)}


@pytest.mark.parametrize(
    "url", ["redis://host", "redis://[::1]:6379", "redis+cluster://user:secret@a:1,b:2,c"]
)
def test_an_index_may_be_any_redis(url: str) -> None:
    assert Config(model=Path("a"), index=url).index == url


def test_every_attention_backend_can_be_configured() -> None:
    assert get_args(get_type_hints(Config)["attention"]) == ("auto", *BACKENDS)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379", "redis://host:6379"),
        ("rediss://user:p@ss@host:6379/0", "rediss://***@host:6379/0"),
        ("redis://host?password=p@ss", "redis://***"),
        ("redis://host?password=pass&db=1", "redis://host?password=***&db=1"),
        ("redis://host?cluster=true&p%61ssword=pass", "redis://host?cluster=true&p%61ssword=***"),
        ("rediss://host?ssl_password=pass", "rediss://host?ssl_password=***"),
        ("redis://u:pass@host?PASSWORD=pass", "redis://***@host?PASSWORD=***"),
    ],
)
def test_a_password_in_the_index_url_is_hidden_in_messages(url: str, shown: str) -> None:
    assert Config(model=Path("a"), index=url).index_for_people == shown


@pytest.mark.parametrize(
    "url",
    ["redis://:p?pass@host", "redis:/:pass@host", "http://u:pass@host", "host?password=pass", "u:pass@host"],
)
def test_a_password_in_an_invalid_index_url_is_hidden_too(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config(model=Path("a"), index=url)
    assert "pass" not in str(refusal.value)


def test_a_switch_without_a_value_means_yes() -> None:
    given = parse("--trust-remote-code", "--batch-invariant", "--cuda-graphs", "no", "--model", "here")
    switches = ("trust_remote_code", "batch_invariant", "cuda_graphs")
    assert [given[name] for name in switches] == ["yes", "yes", "no"]
    with pytest.raises(SystemExit):
        parse("--trust-remote-code", "true")


def test_flags_win_over_the_environment_which_wins_over_defaults() -> None:
    environment = {"MODEL": "a", "INDEX_TIMEOUT_MS": "7", "DECODE_THREADS": "5"}
    in_shell = {f"ENCSVC_{name}": value for name, value in environment.items()} | {"HOME": "x"}
    config = Config.read(parse("--index-timeout-ms", "9"), in_shell)
    assert (config.model, config.index_timeout_ms, config.decode_threads) == (Path("a"), 9, 5)
    assert config.listen == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("", "--model"),
        ("MODEL=a MODLE=b", "ENCSVC_MODLE"),
        ("MODEL=a DRAIN_S=soon", "ENCSVC_DRAIN_S=soon"),
        ("MODEL=a DTYPE=int8", "bfloat16"),
        ("MODEL=a BATCH_PATCHES=-1", "--batch-patches must be from 0 to 16000000, got -1"),
        ("MODEL=a LISTEN=nowhere", "host:port"),
        *((f"MODEL=a INDEX={url}", "--index") for url in ("redis", "http://host", "redis://")),
        *((f"MODEL=a INDEX={url}", "--index") for url in ("redis://host:x", "redis://host:99999")),
        ("MODEL=a INDEX=redis+cluster://a:1,b:y", "--index"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(settings: str, says: str) -> None:
    environment = dict(f"ENCSVC_{setting}".split("=", 1) for setting in settings.split())
    with pytest.raises(ConfigError, match=says):
        Config.read({}, environment)


@pytest.mark.parametrize(
    "number", [each.name for each in fields(Config) if type(each.default) in (int, float)]
)
@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_numbers_must_be_positive_and_finite(number: str, value: float) -> None:
    with pytest.raises(ConfigError, match=flag(number)):
        Config(model=Path("a"), **{number: value})


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (kind, each.name)
        for kind in (Config, GatewayConfig, ServiceConfig)
        for each in fields(kind)
        if type(each.default) is int
    ],
)
def test_a_whole_number_has_a_bound_which_its_refusal_and_its_help_name(kind: Any, number: str) -> None:
    model = {} if kind is GatewayConfig else {"model": Path("a")}
    (most,) = (each.metadata["most"] for each in fields(kind) if each.name == number)
    assert getattr(kind(**model, **{number: most}), number) == most
    with pytest.raises(ConfigError, match=f"^{flag(number)} must be from [01] to {most}, got {most + 1}$"):
        kind(**model, **{number: most + 1})
    parser = argparse.ArgumentParser()
    kind.add_flags(parser)
    (action,) = (each for each in parser._actions if flag(number) in each.option_strings)
    assert f"at most {most};" in str(action.help)


def test_a_whole_number_cannot_be_declared_without_a_bound() -> None:
    with pytest.raises(AssertionError, match="a whole number without `most`"):
        knob(4, help="number of something")
