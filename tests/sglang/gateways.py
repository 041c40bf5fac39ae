"""An unmodified SGLang without the plug-in, fed by gateways."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testing.processes import free_port
from testing.sglang_engine import SglangEngine, serving
from testing.sglang_gateway import GatewayProcess, running_gateway
from tests.engines.answers import PROMPTS, TOLERANCE, Own, assert_equal
from tests.vllm.restartable import Restartable


@contextmanager
def language_server(
    checkpoint: Path, *flags: str, back_end: str = "zmq_to_tokenizer", urls: Sequence[str] = ()
) -> Iterator[tuple[SglangEngine, str]]:
    """Run an SGLang that has no tower in use; yield it, and where gateways register at it."""
    port = free_port()
    given = ["--language-only", "--encoder-transfer-backend", back_end, "--encoder-bootstrap-port", str(port)]
    listed = ["--encoder-urls", *urls] if urls else []
    patience = {"SGLANG_ENCODER_RECV_TIMEOUT": "120"}
    with serving(checkpoint, *given, *flags, *listed, environment=patience) as engine:
        yield engine, f"http://127.0.0.1:{port}"


@contextmanager
def fed(
    checkpoint: Path,
    service: Restartable,
    *flags: str,
    encoders: int,
    back_end: str = "zmq_to_tokenizer",
    **settings: object,
) -> Iterator[tuple[SglangEngine, GatewayProcess]]:
    """Run an SGLang, and a gateway that looks like `encoders` encoders; 0 means one encoder without a path."""
    with running_gateway(service.endpoint, language_model=checkpoint, **settings) as gateway:
        urls = [f"{gateway.url}/v{number}" for number in range(encoders)] or [gateway.url]
        with language_server(checkpoint, *flags, back_end=back_end, urls=urls) as (engine, _):
            yield engine, gateway


def assert_fed(
    engine: SglangEngine,
    gateway: GatewayProcess,
    own: Own,
    names: Iterable[str],
    tolerance: float = TOLERANCE,
) -> None:
    """Ask these prompts of `PROMPTS`: the answers are those of the own tower, by the gateway's rows of every image."""
    for name in names:
        parts = PROMPTS[name]
        before, images = gateway.count("images"), sum(isinstance(part, bytes) for part in parts)
        assert_equal(engine.ask(parts), own(parts), tolerance)
        assert gateway.count("images") - before == images, f"{name}: SGLang used its own tower"
