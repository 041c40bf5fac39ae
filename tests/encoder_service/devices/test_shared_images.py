"""All devices encode a large image as a group, also when a process ends in the middle."""

import asyncio
import os
import signal
from functools import partial

import pytest

from testing.photos import photo
from tests.encoder_service.devices.test_devices import fetched, serving
from tests.servers import server_and_client
from tests.waiting import START_S, soon

LARGE = 1280  # pixels square: 6400 patches


def shared(server):
    """Return how many images were encoded by a group."""
    return server.metrics._shared._value.get()


async def all_free(server):
    """Wait until all devices are idle."""
    await soon(lambda: all(link.is_up and link.tower.is_idle for link in server.dispatcher.links), START_S)


def on_join(server, patch, call):
    """Call `call` whenever a device is told to join a group, with its number and the group."""

    def noted(number, join, group, job):
        join(group, job)
        call(number, group)

    for number, link in enumerate(server.dispatcher.links):
        patch.setattr(link, "join", partial(noted, number, link.join))


async def test_a_large_image_is_encoded_by_all_devices_and_a_small_one_by_one(config, model, monkeypatch):
    images = [photo(LARGE, LARGE, 0), photo(128, 128, 1)]
    async with server_and_client(config, model) as (server, client):
        expected = await fetched(client, images)
    async with serving(config, "cpu,cpu") as (server, client, devices):
        assert server.dispatcher._group is not None, "the server was started"
        await all_free(server)
        joins = asyncio.Queue()
        on_join(server, monkeypatch, lambda _, group: joins.put_nowait(group.number))
        large = asyncio.create_task(fetched(client, images[:1]))
        assert await asyncio.wait_for(joins.get(), START_S) == 0, "the group of the start"
        assert await fetched(client, images[1:]) == expected[1:]
        assert await large == expected[:1]
        assert shared(server) == 1
        await soon(
            lambda: sum(device.counts["eager_batches"] for device in devices) == 2 + 2
        )  # two warmed up


@pytest.mark.parametrize("who", ["helper", "leader"])
async def test_an_image_outlives_the_processes_that_encode_it(config, who, monkeypatch):
    async with serving(config, "cpu,cpu") as (server, client, devices):
        await all_free(server)
        [before] = await fetched(client, [photo(LARGE, LARGE, 0)])
        assert shared(server) == 1
        await all_free(server)
        pairs = asyncio.Queue()

        def hold(number, group):
            """Stop the device that lives on: the two cannot finish the image before the other one is killed."""
            helper, leader = devices[number], devices[group.leader]
            killed, other = (helper, leader) if who == "helper" else (leader, helper)
            os.kill(other.process.pid, signal.SIGSTOP)
            pairs.put_nowait((killed, other))

        with monkeypatch.context() as patch:
            on_join(server, patch, hold)
            large = asyncio.create_task(fetched(client, [photo(LARGE, LARGE, 1)]))
            killed, other = await asyncio.wait_for(pairs.get(), START_S)
        os.kill(killed.process.pid, signal.SIGKILL)
        os.kill(other.process.pid, signal.SIGCONT)
        await large
        assert shared(server) == 1, "one device encoded it"
        assert await fetched(client, [photo(LARGE, LARGE, 0)]) == [before]
        await soon(lambda: killed.is_up and killed.restarts["killed"] == 1, START_S)
        await all_free(server)
        await fetched(client, [photo(LARGE, LARGE, 2)])
        assert shared(server) == 2, "in another group"
        assert server.store.stats().tiers[-1].entries == 3


async def test_one_device_forms_no_group(config):
    async with serving(config, "cpu") as (server, client, _):
        await fetched(client, [photo(LARGE, LARGE, 0)])
        assert shared(server) == 0
