"""Where replicas say that they are reached, and ports that listen on both families."""

import socket

import pytest

from encoder_service.api.describe import reachable
from encoder_service.config import Config, ConfigError
from tests.operator_view import answer_of, http_port


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("10.0.0.5", "10.0.0.5:50051"),
        ("fd00::5", "[fd00::5]:50051"),
        ("10.0.0.5:7", "10.0.0.5:7"),
        ("[fd00::5]:7", "[fd00::5]:7"),
        ("encoder-0.example:50051", "encoder-0.example:50051"),
    ],
)
def test_an_advertised_address_gets_the_port_of_listen(advertise: str, expected: str) -> None:
    required = {"model": "/model", "listen": "0.0.0.0:50051", "listen_unprotected": "yes"}
    assert Config.read({**required, "advertise": advertise}, {}).advertise == advertise
    assert reachable("[::]:50051", advertise) == expected
    assert reachable("0.0.0.0:50051", advertise) == expected


def test_a_host_name_needs_a_port() -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        Config.read({"model": "/model", "advertise": "encoder-0.example"}, {})
    with pytest.raises(ConfigError, match=r"--advertise .* the port of a server"):
        Config.read({"model": "/model", "advertise": "encoder-0.example:0"}, {})


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_the_http_port_on_all_interfaces_serves_both_families() -> None:
    with http_port("[::]:0") as port:
        number = port.endpoint.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            assert answer_of(f"http://{host}:{number}/healthz")[0] == 200
