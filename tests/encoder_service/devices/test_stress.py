"""Random delays, withdrawals, failures, lost processes and a small store: every job ends, and no credit stays out.

`python -m tests.encoder_service.devices.test_stress EVENTS SEED` runs more events, for hours if wanted.
"""

import asyncio
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import Empty

import pytest

from encoder_contract.errors import EncoderError, InvalidImageError, OverloadedError
from encoder_contract.geometry import Grid
from encoder_service.config import Config
from encoder_service.devices import messages
from encoder_service.devices.dispatcher import MOST_FAILURES
from encoder_service.devices.model import Model, load_model
from encoder_service.scheduler import Claim
from encoder_service.store import Pin
from tests.scripted_device import Floor, ScriptedDevice, floor
from tests.waiting import soon

EVENTS = 2000  # in `make test`: seconds
GRIDS = [Grid(1, 4, 4), Grid(1, 8, 8), Grid(1, 16, 16), Grid(1, 64, 64)]
PAGES = 40
CALLERS = 24
# Each device dies after so many answers at the latest, whatever the dice say.
FIRST_DEATH = 50


class RandomDevice:
    """Plays the process of a device: returns what it was sent, in random order, after random delays, or dies."""

    def __init__(self, device: ScriptedDevice, dice: random.Random, seen: Counter[str]) -> None:
        self._device = device
        self._dice = dice
        self._seen = seen
        self._connection = device.theirs
        self._has: list[messages.Decode | messages.ForTower] = []
        self._left = FIRST_DEATH
        self.dies = True

    async def play(self) -> None:
        """Play until cancelled."""
        while True:
            await asyncio.sleep(self._dice.choice((0, 0, 0, 0.001, 0.005)))
            # The server gives up once all its devices only fail.
            self._device.failures = min(self._device.failures, MOST_FAILURES - 2)
            with suppress(Empty):
                while True:
                    connection, sent = self._device.sent.get_nowait()
                    if connection is not self._device.theirs:
                        continue  # of a process that has ended, read late
                    self._connection = connection
                    self._seen[type(sent).__name__] += 1
                    if isinstance(sent, messages.Begin):
                        self._has.clear()  # another process
                    elif isinstance(sent, messages.Decode | messages.ForTower):
                        self._has.append(sent)
            if self._has and self._connection is self._device.theirs:
                with suppress(OSError):
                    self._answer(self._has.pop(self._dice.randrange(len(self._has))))
            self._left -= bool(self._has)
            if self.dies and (self._dice.random() < 0.002 or not self._left):
                self._seen["killed"] += 1
                self._left -= 1  # once, even if the next process is sent nothing
                self._device.kill()

    def _answer(self, sent: messages.Decode | messages.ForTower) -> None:
        self._device.tell(messages.Report(None))
        dice = self._dice.random()
        if isinstance(sent, messages.FormGroup):
            self._device.tell(messages.LeftGroup(sent.number, failed=dice < 0.2))
        elif isinstance(sent, messages.JoinGroup):
            self._device.tell(messages.LeftGroup(sent.group.number, failed=dice < 0.2))
        elif isinstance(sent, messages.Encode):
            if dice < 0.1:
                self._device.tell(messages.Failed(sent.batch, OverloadedError("no memory", retry_after_ms=1)))
            else:
                errors = [
                    InvalidImageError("bad") if self._dice.random() < 0.05 else None for _ in sent.images
                ]
                self._device.encoded(sent, self._dice.choice((0.001, 0.01, 1.0)), errors)
        else:
            numbers = [image.number for image in sent.images]
            self._dice.shuffle(numbers)
            cut = self._dice.randrange(len(numbers) + 1)
            if numbers[:cut]:
                self._device.prepared(*numbers[:cut])
            for number in numbers[cut:]:
                if dice < 0.3 and not sent.single:
                    self._device.tell(messages.Retry([number], 0.001))
                else:
                    self._device.tell(messages.Dropped(number, InvalidImageError("broken"), 0.0, 0.001))


async def call(at: Floor, dice: random.Random, seen: Counter[str]) -> None:
    """Do what one caller does: ask for an image, known or new; wait for it, hold it for a while, or leave."""
    name = b"%d" % dice.randrange(60)
    claim = Claim(dice.choice("abcd"), dice.choice("wxyz"), demanded=dice.random() < 0.7)
    try:
        job = at.submit(name, claim, grid=GRIDS[int(name) % len(GRIDS)], batch=dice.random() < 0.5)
    except AssertionError:
        seen["held"] += 1
        return
    except EncoderError as error:
        seen[type(error).__name__] += 1
        return
    waiting = at.jobs.wait(job, claim)
    try:
        async with asyncio.timeout(dice.choice((0.001, 0.01, 60, 60, 60))):
            pin = await waiting
    except TimeoutError:
        seen["left"] += 1
    except EncoderError as error:
        seen[type(error).__name__] += 1
    else:
        assert isinstance(pin, Pin)
        seen["rows"] += 1
        await asyncio.sleep(dice.choice((0, 0.001, 0.01)))
        pin.release()


async def run(model: Model, events: int, seed: int) -> Counter[str]:
    """Run so many calls; check that nothing is left at the end."""
    dice, seen = random.Random(seed), Counter[str]()
    async with floor(model, devices=2, store_bytes=PAGES << 16, group_patches=4096, decode_threads=3) as at:
        players = [RandomDevice(each, dice, seen) for each in at.devices]
        playing = [asyncio.create_task(player.play()) for player in players]
        left = events

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await call(at, dice, seen)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        for player in players:
            player.dies = False
        await soon(lambda: not at.jobs, 120)
        await soon(
            lambda: all(link.is_up and not link._jobs and link.tower.is_idle for link in at.links), 120
        )
        for task in playing:
            task.cancel()
        for link in at.links:
            left_over: list[object] = [link._decoding, link._decode_batches, link._singles, link._prepared]
            left_over += [link.tower.batches, link._unwanted, link._files, link.patches]
            assert not any(left_over), left_over
        counts = at.jobs.scheduler.snapshot()
        assert (counts.claims, counts.requests, counts.clients, counts.source_bytes) == (0, 0, 0, 0)
        assert at.store.stats().pins == 0
        at.store.flush()
        assert at.store.stats().tiers[-1].used_bytes == 0, "no pages are lost"
    return seen


@pytest.mark.slow
async def test_no_credit_page_or_job_is_lost_in_any_order_of_events(model: Model) -> None:
    seen = await run(model, EVENTS, seed=7)
    for what in ("rows", "left", "killed", "Gone", "JoinGroup", "InvalidImageError"):
        assert seen[what], (what, seen)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    from testing.checkpoints import write_checkpoint

    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder))
        print(
            asyncio.run(
                run(load_model(Config(model=path, devices="cpu")), int(sys.argv[1]), int(sys.argv[2]))
            )
        )
