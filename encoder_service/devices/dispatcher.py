"""Pushes the queue's jobs to the devices, and restarts devices whose process ends or does not answer.

On the event loop: there is no thread for a device, and no lock.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from encoder_contract.backoff import backoff_s
from encoder_contract.geometry import Grid
from encoder_service.cluster.tasks import start_task
from encoder_service.config import ConfigError
from encoder_service.devices.device_link import Link, Shared
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.devices.watchdog import TICK_S
from encoder_service.image.decoder import DECODE_PIXELS
from encoder_service.metrics import Metrics
from encoder_service.store import Store

log = logging.getLogger(__name__)

# The server ends once the processes of every device have ended this often in a row, without a completed batch.
MOST_FAILURES = 5
# A process is restarted at once until it has failed this often in a row, then after a pause.
_FAILURES_WITHOUT_PAUSE = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0
_SHORTAGE_PAUSE_S = 1.0
GROUP_S = 10.0
"""How long the start of the server waits for the devices to form their group."""
FIRST_GROUP_PAUSE_S, LAST_GROUP_PAUSE_S = 1.0, 300.0
"""Pauses before the devices form another group: the first after a group has encoded an image and then failed, twice as
long after each that failed without one."""
STOP_S = 10.0
"""How long the devices may take for the batches that they have, when the server stops."""
KILL_S = 5.0
"""How long killed processes are waited for. One that the kernel cannot end now ends with the server."""


class Dispatcher:
    """Serves all devices from one queue and one store."""

    def __init__(
        self,
        devices: Sequence[DeviceProcess],
        queue: JobQueue,
        store: Store,
        metrics: Metrics,
        tokens: Callable[[Grid], int],
        *,
        decode_pixels: int = DECODE_PIXELS,
    ) -> None:
        """`tokens` returns the number of rows of an image.

        A device decodes at most `decode_pixels` of sources in a batch, and as many again one by one. Give the scheduler
        the same number as `large_pixels`: one image of more pixels is decoded beside these.
        """
        self._queue, self._scheduler = queue, queue.scheduler
        self._store = store
        self._shared = Shared(
            queue=queue,
            store=store,
            metrics=metrics,
            tokens=tokens,
            devices=len(devices),
            on_lost_group=self._group_failed,
            decode_pixels=decode_pixels,
        )
        self.links = [Link(device, self._shared) for device in devices]
        self._others = {link: [other for other in self.links if other is not link] for link in self.links}
        self._group_number = 0
        self._group_asked = -1  # the number of the last group that the devices were to form
        self._forms_groups = any(device.facts.group_patches for device in devices)
        self._rendezvous = None
        if self._forms_groups:
            from encoder_service.vision.ulysses import start_rendezvous  # imports torch

            self._rendezvous = start_rendezvous()
        self._is_group_due = self._forms_groups
        self._group_settled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self.on_answers: Callable[[bool], None] = lambda _answers: None
        """Called with True when a device answers again, and with False when none does any more."""
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        queue.dispatch, queue.on_gone = self._dispatch, self._gone
        store.on_freed.append(self._on_freed)

    def start(self) -> None:
        """Take over the devices, which have loaded."""
        self._tasks = [start_task(self._serve(link), f"device-{link.device.number}") for link in self.links]
        self._watching = start_task(self._watch(), "devices-watchdog")

    async def formed(self) -> None:
        """Wait until the devices have formed a group, or failed to, but not for long."""
        began = self._loop.time()
        try:
            async with asyncio.timeout(GROUP_S):
                await self._group_settled.wait()
        except TimeoutError:
            log.warning(
                "the devices have not formed a group within %g s: images wait until they have", GROUP_S
            )
        else:
            if self._group is not None:
                log.info("the devices formed a group in %.1f s", self._loop.time() - began)

    async def stop(self) -> None:
        """Wait until the devices have finished the batches that they have, but not for long. Close the queue first."""
        self._stopping.set()
        self._store.on_freed = [call for call in self._store.on_freed if call != self._on_freed]
        if self._watching is not None:
            self._watching.cancel()
        for link in self.links:
            link.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
            for link in self.links if late else ():
                link.device.kill()
            if late:
                _, late = await asyncio.wait(late, timeout=KILL_S)
            for task in late:
                log.error("%s: its process cannot be ended", task.get_name())
                task.cancel()

    @property
    def answers(self) -> bool:
        """Whether at least one device answers."""
        return any(link.answers for link in self.links)

    # Pushing work

    def _dispatch(self) -> None:
        """Push what the devices may have now. Waits for nothing."""
        if not self._group_settled.is_set():
            self._form_group()
        for link in self.links:
            link.push_batches(self._others[link], self._group)
        self._share_out(Link.push_decode_batch, single=False)
        self._share_out(Link.push_single, single=True)
        if idle := [link for link in self.links if link.tower.is_idle]:
            is_starved = self._scheduler.waiting_images > 0
            for link in idle:
                if is_starved is (link.idle_since is None):
                    link.note_idle(is_starved=is_starved)

    def _share_out(self, push: Callable[[Link], bool], *, single: bool) -> None:
        """Push while images wait and a device has credit: always to the device that has the fewest patches."""
        links = list(self.links)
        while links and self._scheduler.may_decode(single=single):
            link = min(links, key=lambda each: each.patches)
            if not push(link):
                links.remove(link)

    def _gone(self, job: Job) -> None:
        self.links[job.device].gone(job)

    def _on_freed(self) -> None:
        """Take note that the store may have space. Called on any thread, with the store's lock held."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._freed)

    def _freed(self) -> None:
        wait = self._shared.store_wait
        if wait.since is not None and self._store.fits(wait.tokens):
            wait.since = None
        self._queue.poke()

    # The group of all devices

    @property
    def _group(self) -> int | None:
        """The number of the group that the devices have formed; None if they have not."""
        is_formed = self._group_settled.is_set() and self._group_asked == self._group_number
        return self._group_number if is_formed else None

    def _want_group(self) -> None:
        """Have the devices form a group, unless they have or do."""
        if self._forms_groups and self._group_asked != self._group_number:
            self._is_group_due = True
            self._group_settled.clear()
            self._queue.poke()

    def _form_group(self) -> None:
        """Have the devices form a group as soon as all are idle, so that no image waits for it: NCCL takes seconds."""
        if self._is_group_due:
            if all(link.is_up and link.tower.is_idle for link in self.links):
                self._is_group_due, self._group_asked = False, self._group_number
                for link in self.links:
                    link.form_group(self._group_number)
        elif all(link.tower.forming is None for link in self.links):
            self._group_settled.set()

    def _group_failed(self, number: int) -> None:
        """Have the devices form another group after a pause: until then, one of them encodes a large image."""
        if number == self._group_number:
            self._group_lost()
            pause_s = backoff_s(self._shared.group_failures, FIRST_GROUP_PAUSE_S, LAST_GROUP_PAUSE_S)
            self._shared.group_failures += 1
            self._loop.call_later(pause_s, self._want_group)

    def _group_lost(self) -> None:
        """Have all devices leave the group that one of them has left."""
        number, self._group_number = self._group_number, self._group_number + 1
        for link in self.links:
            link.leave_group(number)

    # The processes

    async def _serve(self, link: Link) -> None:
        device = link.device
        while True:
            await link.connect(self._rendezvous.port if self._rendezvous is not None else 0)
            self._want_group()
            self._queue.poke()
            await link.lost.wait()
            was_forming = link.tower.forming is not None
            entries = link.disown()
            if self._rendezvous is not None:
                self._group_lost()
            why = await asyncio.to_thread(device.ended)
            for entry in entries:
                self._store.abandon(entry)
            if self._stopping.is_set():
                return
            log.error("the process of %s ended (%s): starting another", device.name, why)
            if was_forming and why != "killed":
                self._forms_groups = self._is_group_due = False
                log.error(
                    "%s ended while it formed a group: from now on, one device encodes a large image",
                    device.name,
                )
            while not await self._start(device, why):
                if self._stopping.is_set():
                    return

    async def _start(self, device: DeviceProcess, why: str) -> bool:
        """Start a process after a pause. Return whether it has loaded. Ends the server if all devices keep failing."""
        if all(link.device.failures >= MOST_FAILURES for link in self.links):
            self._queue.abort("the server lost its devices", RuntimeError(f"the last process ended ({why})"))
            self._stopping.set()
        retries = device.failures - _FAILURES_WITHOUT_PAUSE
        pause_s = backoff_s(retries, _FIRST_PAUSE_S, _LAST_PAUSE_S) if retries >= 0 else 0.0
        if await self._stops_within(pause_s):
            return False
        try:
            device.start()
        except OSError as error:  # files, processes or memory are short: the device did not fail
            log.error("the process of %s does not start yet: %s", device.name, error)
            await self._stops_within(_SHORTAGE_PAUSE_S)
            return False
        try:
            await asyncio.to_thread(device.load)
        except ConfigError as error:
            log.error("the process of %s does not start: %s", device.name, error)
            device.failures += 1
            return False
        if self._stopping.is_set():
            await asyncio.to_thread(device.end)
            return False
        return True

    async def _stops_within(self, seconds: float) -> bool:
        """Wait so long, or until the server stops; return whether it does."""
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False

    async def _watch(self) -> None:
        answered = True
        while True:
            await asyncio.sleep(TICK_S)
            for link in self.links:
                if link.is_up and (why := link.tick()):
                    log.error("the process of %s is stuck, %s: killing it", link.device.name, why)
                    link.device.is_stuck = True
                    link.device.kill()
            if self.answers is not answered:
                answered = self.answers
                self.on_answers(answered)
