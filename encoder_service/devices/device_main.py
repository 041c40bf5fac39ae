"""A device's process: loads the model, runs the worker threads on what the server sends, and reports.

Rows are written directly into the store's memory, which is mapped. An error that makes the device unusable ends the
process, and the server starts another. In tests, `run` is the target of a thread.
"""

import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from encoder_contract.device_memory import open_memory
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_contract.segment_file import open_segment
from encoder_contract.settings import ConfigError, flag
from encoder_service.child import become_child
from encoder_service.config import Config
from encoder_service.devices import messages
from encoder_service.devices.allocator import keep_freed_memory, out_of_collections
from encoder_service.devices.device_inbox import Inbox
from encoder_service.devices.device_reports import DeviceState
from encoder_service.devices.model import Model, decode_threads, facts_of, load_model, state_of
from encoder_service.devices.torch_device import Device
from encoder_service.devices.workers import DeviceWorkers, Memory
from encoder_service.families.counted_rows import CountedRows
from encoder_service.families.model import VisionModel
from encoder_service.logs import known_error, set_up_logging
from encoder_service.store.registration import registration_of
from encoder_service.store.tensors import tensor_over
from encoder_service.vision import Tower
from encoder_service.vision.ulysses import UlyssesGroup

log = logging.getLogger(__name__)


def main(descriptors: Sequence[int], *, parent: int) -> None:
    """Load the server's model, report it, and work until the server closes. `parent` is the server's pid."""
    become_child("device", parent)
    keep_freed_memory()
    connection, counting = socket.socket(fileno=descriptors[0]), Connection(descriptors[1])
    try:
        load: messages.Load = messages.receive(connection)
        config, processes = load.config, load.processes
        set_up_logging(config.log_level, config.log_format)
        cores = len(os.sched_getaffinity(0))
        if config.devices == "cpu" and processes * torch.get_num_threads() > cores:
            torch.set_num_threads(max(1, cores // processes))
        loaded = threading.Event()
        reporting = _report(partial(messages.send, connection), lambda: None, loaded)
        model = _load(config, processes, load.beside_bytes)
        loaded.set()
        reporting.join()
        if isinstance(model, ConfigError):
            messages.send(connection, model)
            end(0)
        messages.send(connection, facts_of(model, config, processes))
    except OSError:
        end(0)  # the server has gone
    if isinstance(model.tower.geometry, CountedRows):
        rule = model.tower.geometry
        threading.Thread(target=_count_rows, args=(rule, counting), name="count-rows", daemon=True).start()
    with out_of_collections():
        run(model, connection, load.number, processes, decode_threads(config, model.device))
    model.decoder.close()
    end(0)


def end(status: int) -> NoReturn:
    """End the process at once: an orderly exit of the interpreter may hang or crash on a lost device."""
    logging.shutdown()
    os._exit(status)


def run(
    model: Model,
    connection: socket.socket,
    number: int,
    devices: int,
    single_decoders: int,
    end: Callable[[int], NoReturn] = end,
) -> None:
    """Encode what the server sends until it closes. This is device `number` of several."""
    inbox = Inbox(connection, end)
    try:
        begin: messages.Begin = messages.receive(connection)
    except OSError:
        end(0)  # the server has gone
    done = threading.Event()
    # First of all, because the server kills a silent device.
    reporting = _report(inbox.tell, partial(state_of, model), done, model.device.make_current)
    group = _group(inbox, model.tower, begin.rendezvous, number, devices)
    workers = DeviceWorkers(
        inbox,
        model,
        _memory(begin, model.device),
        decode_threads=single_decoders,
        group=group,
    )
    reading = threading.Thread(target=inbox.read, args=(single_decoders,), name="reader", daemon=True)
    reading.start()
    workers.start()
    workers.join()
    done.set()
    reporting.join()


def _memory(begin: messages.Begin, device: Device) -> Memory:
    """Map the store's memory."""
    file = open_segment(begin.segment, writes=True)
    segment = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)  # keeps a descriptor of its own
    os.close(file)
    memory = {"host": segment[begin.data_offset :]}
    if device.kind == "cuda":  # copies to registered memory run at full speed, beside the tower
        registration_of(segment, device.name)
    if begin.tier is not None:
        gpu = int(device.name.partition(":")[2] or 0)
        memory["device"] = tensor_over(open_memory(*begin.tier, gpu, writes=True), device.name)
    return memory


def _load(config: Config, processes: int, beside_bytes: int) -> Model | ConfigError:
    try:
        return load_model(config, processes, beside_bytes)
    except ConfigError as error:
        return error
    except Exception as error:  # noqa: BLE001 - from libraries; the server reports it in one line
        return ConfigError(f"{flag('model')} {config.model}: {type(error).__name__}: {error}")


def _group(inbox: Inbox, tower: VisionModel, port: int, number: int, processes: int) -> UlyssesGroup | None:
    """Return the group of all processes, if there are others and the tower can encode in a group."""
    if processes == 1 or not isinstance(tower, Tower) or not tower.can_encode_in_group(processes):
        return None
    group = UlyssesGroup(tower.device, port, number, processes)
    inbox.leave_group = group.abort
    return group


def _report(
    tell: Callable[[messages.Report], None],
    state_now: Callable[[], DeviceState | None],
    done: threading.Event,
    begin: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Begin to tell the server regularly that this process lives, and its state when that has changed.

    Return the thread, which calls `begin` first and ends when `done` is set: nothing else runs on it, so that the
    process is as alive as it says.
    """

    def report() -> None:
        begin()
        sent, is_done = None, False
        while not is_done:
            state = state_now()
            try:
                tell(messages.Report(None if state == sent else state))
            except OSError:  # the server has gone: the next message notices
                return
            sent, is_done = state, done.wait(messages.REPORT_S)

    thread = threading.Thread(target=report, name="report", daemon=True)
    thread.start()
    return thread


def _count_rows(rule: CountedRows, counting: Connection) -> None:
    while True:
        size = counting.recv()
        try:
            answer: Grid | str | EncoderError = rule.counted(*size)
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            answer = known_error(error)
        counting.send(answer)
