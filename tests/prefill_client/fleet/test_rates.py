"""A client of real servers gives them images by the rates that they measure."""

from collections import Counter

from encoder_contract.errors import OverloadedError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.scheduler.admission import RECENT_S
from prefill_client import EncoderClient, Submitted
from testing.photos import photo
from tests.calls import all_connect, connection
from tests.gate import Gate
from tests.servers import server_of

PHOTOS = [photo(64, 64 + number, 700 + number) for number in range(96)]


def measured(server: Server, patches_per_s: float, seconds: float) -> None:
    """Let the server measure this rate for so long."""
    for _ in range(10):
        server.jobs.scheduler._admission.recent_rate.add(round(patches_per_s * seconds / 10), seconds / 10)


def placed(answers: list[Submitted]) -> Counter[str]:
    assert [answer.error for answer in answers if not isinstance(answer.error, OverloadedError)] == [
        None
    ] * len(answers)
    return Counter(answer.endpoint for answer in answers)


async def test_images_follow_the_rates_that_servers_publish(config: Config, model: Model, gate: Gate) -> None:
    gated = gate.before(model)
    async with server_of(config, gated) as first, server_of(config, gated) as second:
        measured(first, 9e6, 10.0)
        measured(second, 1e6, 10.0)
        client = await EncoderClient.connect([first.endpoint, second.endpoint])
        async with client:
            await all_connect(client)
            with gate.closed():  # no image is measured
                by_describe = placed(await client.submit(PHOTOS[:32]))
                assert by_describe[first.endpoint] == 29, "nine tenths, rounded up"
                measured(first, 4.5e6, 2.0)
                placed(await client.submit(PHOTOS[32:64]))  # its answer has the new rate
                by_answer = placed(await client.submit(PHOTOS[64:]))
                assert by_answer[first.endpoint] <= 27, "two seconds later, it has 83 % instead of 90 %"


async def test_a_server_publishes_no_rate_before_a_second_of_work(config: Config, model: Model) -> None:
    async with server_of(config, model) as server:
        measured(server, 5e6, 0.9 * RECENT_S)
        assert server.jobs.scheduler.recent_patches_per_s == 0.0
        measured(server, 5e6, 0.2 * RECENT_S)
        assert 4e6 < server.jobs.scheduler.recent_patches_per_s < 6e6
        async with await EncoderClient.connect(server.endpoint) as client:
            assert 4e6 < (await connection(client)).patches_per_s < 6e6
