"""Decoder processes that die, stop or are swamped: one image fails, what it failed of is counted, and all goes on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from encoder_contract.errors import EncoderError, OverloadedError, UndecodableImageError
from encoder_service.engine.job_queue import FailureCache
from encoder_service.image import decoder_pool
from encoder_service.image.decoder import DEATHS, Decoder
from encoder_service.image.decoder_pool import (
    PASSED_ON,
    SETTINGS,
    DecoderStartError,
    IsolatedDecoder,
    PixelMemory,
    _parsed,
)
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from testing.photos import damaged, encoded, photo, pixels
from tests.engines import Changed
from tests.waiting import START_S

PHOTO = photo(120, 80, 1)


@contextmanager
def decoding(**settings: Any) -> Iterator[IsolatedDecoder]:
    decoder = IsolatedDecoder(**{"threads": 1, "backend": "pillow", **settings})
    decoder.start()
    try:
        yield decoder
    finally:
        decoder.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[IsolatedDecoder]:
    with decoding() as decoder:
        yield decoder


def children(decoder: IsolatedDecoder) -> list[int]:
    """The pids of its decoder processes."""
    idle = [*decoder._batch_child.queue, *decoder._single_children.queue]
    return [child._forked.pid for child in idle if child._forked is not None]


def source_of(image: bytes) -> Source:
    source = Decoder(backend="pillow")._source(image)
    assert isinstance(source, Source)
    return source


def while_stopped(decoder: IsolatedDecoder, work: Callable[[], Any], *signals: int) -> Any:
    """Return what `work` does, begun while the children are stopped, once they have got the signals."""
    stopped = children(decoder)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    # It has sent its request by now; if not, it is sent to a child that has died: the same to it.
    time.sleep(0.2)
    for number in signals:
        for pid in stopped:
            os.kill(pid, number)
    thread.join()
    return results[0]


def deaths(decoder: IsolatedDecoder) -> dict[str, int]:
    return {reason: count for reason, count in decoder.deaths.items() if count}


def test_what_is_damaged_has_the_same_outcome_as_in_process(decoder: IsolatedDecoder) -> None:
    files = [damaged(seed) for seed in range(150)]
    here = Decoder(backend="pillow")
    for isolated_one, in_process in zip(decoder.decode(files), here.decode(files), strict=True):
        assert type(isolated_one) is type(in_process)
        if isinstance(in_process, torch.Tensor):
            assert isinstance(isolated_one, torch.Tensor)
            assert torch.equal(isolated_one, in_process)


def test_a_decoder_that_is_killed_is_not_the_images_fault_and_is_there_again(
    decoder: IsolatedDecoder,
) -> None:
    before, (pid,) = deaths(decoder).get("killed", 0), children(decoder)
    outcome = while_stopped(decoder, lambda: decoder.decode_one(source_of(PHOTO)), signal.SIGKILL)
    assert isinstance(outcome, OverloadedError)
    assert outcome.retryable
    assert deaths(decoder)["killed"] == before + 1
    assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)
    assert children(decoder) != [pid]
    assert not psutil.pid_exists(pid), "it was not reaped"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_decoder_that_crashes_fails_its_image_which_is_remembered(
    decoder: IsolatedDecoder, number: signal.Signals
) -> None:
    before = deaths(decoder).get("crashed", 0)
    outcome = while_stopped(decoder, lambda: decoder.decode_one(source_of(PHOTO)), number, signal.SIGCONT)
    assert isinstance(outcome, UndecodableImageError)
    assert not outcome.retryable
    assert deaths(decoder)["crashed"] == before + 1
    failures, key = FailureCache(), ImageKey(b"a" * 32, b"d" * 32)
    failures.note(key, outcome)
    with pytest.raises(UndecodableImageError, match="crashed on this JPEG"):
        failures.check(replace(key, address=b"of another variant"))
    assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)


def test_a_decoder_that_does_not_answer_is_replaced_while_another_decodes() -> None:
    with decoding(threads=2, cpu_s=1) as decoder:
        stopped = children(decoder)[-1]  # the next to be taken
        os.kill(stopped, signal.SIGSTOP)
        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(decoder.decode_one, [source_of(PHOTO)] * 2))
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["OverloadedError", "Tensor"]
        assert deaths(decoder) == {"stuck": 1}
        assert stopped not in children(decoder)
        assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)


def heavy() -> bytes:
    """Nine megapixels that take hundreds of megabytes and a second to decode."""
    noise = np.random.default_rng(1).integers(0, 255, (150, 150, 3), np.uint8)
    return encoded(Image.fromarray(noise).resize((3000, 3000)), "JPEG2000")


def test_an_image_that_takes_too_much_time_or_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    file = heavy()
    monkeypatch.setattr(decoder_pool, "_WALL_S", 60.0)  # on a busy machine it may wait long for its processor
    with decoding(cpu_s=0.05) as decoder:
        slow = decoder.decode_one(source_of(file))
        assert isinstance(slow, UndecodableImageError)
        assert "more than 0.05 s of a processor" in slow.message
        assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)
        assert deaths(decoder) == {"time": 1}
    monkeypatch.setattr(decoder_pool, "_BESIDE_PIXELS_BYTES", 32 << 20)
    with decoding(max_image_pixels=10_000, decode_pixels=10_000) as decoder:
        large = decoder.decode_one(source_of(file))
        assert isinstance(large, UndecodableImageError)
        assert "more memory than" in large.message
        assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)
        assert deaths(decoder) == {"memory": 1}


@pytest.mark.dali
def test_a_batch_whose_decoder_dies_is_left_to_be_decoded_one_by_one() -> None:
    with decoding(backend="dali") as decoder:
        sources = [source_of(photo(120, 80, seed)) for seed in range(3)]
        expected = [decoder.decode_one(source) for source in sources]
        first = decoder.decode_batch(sources)
        assert all(isinstance(each, torch.Tensor) for each in first)
        left = while_stopped(decoder, lambda: decoder.decode_batch(sources), signal.SIGSEGV, signal.SIGCONT)
        # What died was the first attempt: the images are tried again one by one, by the next decoder.
        for pixels, before, alone in zip(left, first, expected, strict=True):
            assert torch.equal(pixels, before)
            assert (pixels.int() - alone.int()).abs().max() <= 2
        assert deaths(decoder)["crashed"] == 1


def test_when_the_parent_of_the_decoders_dies_another_is_started(decoder: IsolatedDecoder) -> None:
    before = decoder.deaths["killed"]
    old = [psutil.Process(pid) for pid in children(decoder)]
    (parent,) = {each.ppid() for each in old}
    os.kill(parent, signal.SIGKILL)
    while decoder.deaths["killed"] == before:  # the old one may still have answered
        outcome = decoder.decode_one(source_of(PHOTO))
    assert isinstance(outcome, OverloadedError)
    assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in old)


def test_closing_ends_every_process_and_a_further_use_starts_them_again() -> None:
    others = {each.pid for each in psutil.Process().children(recursive=True)}

    def ours() -> list[int]:
        return [each.pid for each in psutil.Process().children(recursive=True) if each.pid not in others]

    with decoding() as decoder:
        assert len(ours()) == 2
        decoder.close()
        assert ours() == []
        assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)
    assert ours() == []


def test_pixels_stay_what_they_are_while_others_are_decoded(decoder: IsolatedDecoder) -> None:
    images = [photo(64 + seed, 48, seed) for seed in range(6)]
    here = Decoder(backend="pillow").decode(images)
    for found, expected in zip(decoder.decode(images), here, strict=True):
        assert isinstance(expected, torch.Tensor)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)


def test_a_parent_whose_server_ended_while_it_was_loading_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = (
        "from encoder_service.image.decoder_process import main; "
        f"main({theirs.fileno()}, dali=False, threads=1)"
    )
    command = [sys.executable, "-c", program]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        ours.close()
        assert process.communicate(timeout=START_S)[1] == b""
    assert process.returncode == 0


def test_all_descriptors_are_taken_at_the_start_and_no_more_however_much_is_decoded() -> None:
    with decoding(threads=2) as decoder, ThreadPoolExecutor(2) as threads:
        list(threads.map(str, range(8)))
        before = psutil.Process().num_fds()
        for side in (64, 500, 900):  # the last takes more memory than there is at the start
            files = [source_of(photo(side, side, seed)) for seed in range(6)]
            assert all(isinstance(each, torch.Tensor) for each in threads.map(decoder.decode_one, files))
        assert psutil.Process().num_fds() <= before


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


def test_decoder_processes_have_six_variables_of_the_servers_environment_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENCSVC_INDEX", "rediss://encoder:secret@redis")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/libraries")
    with decoding() as decoder:
        (child,) = children(decoder)
        for pid in (child, psutil.Process(child).ppid()):
            assert environment(pid).keys() <= {*SETTINGS, *PASSED_ON}
            assert environment(pid)["LD_LIBRARY_PATH"] == "/opt/libraries"
    assert len({*SETTINGS, *PASSED_ON}) == 6


def test_what_a_library_prints_is_counted_and_thrown_away(capfd: pytest.CaptureFixture[str]) -> None:
    noisy = bytearray(
        encoded(Image.fromarray(pixels(400, 300, 1)).convert("1"), "TIFF", compression="tiff_ccitt")
    )
    noisy[8:1000] = bytes(range(248)) * 4  # behind the header are the pixels
    with decoding() as decoder:
        before = decoder.messages
        decoder.decode([bytes(noisy)])
        assert decoder.messages > before
    assert capfd.readouterr().err == ""


def test_why_no_decoder_starts_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "_MODULE", "no.such.module")
    decoder = IsolatedDecoder(threads=1, backend="pillow")
    with pytest.raises(DecoderStartError, match="No module named 'no'"):
        decoder.start()


def test_a_decoder_that_hangs_without_using_the_processor_is_replaced_long_before_its_limit() -> None:
    with decoding(cpu_s=10 * START_S) as decoder:
        (stopped,) = children(decoder)
        os.kill(stopped, signal.SIGSTOP)
        outcomes: list[Any] = []
        thread = threading.Thread(
            target=lambda: outcomes.append(decoder.decode_one(source_of(PHOTO))), daemon=True
        )
        thread.start()
        thread.join(START_S)
        assert [type(outcome) for outcome in outcomes] == [OverloadedError]
        assert deaths(decoder) == {"stuck": 1}
        assert isinstance(decoder.decode_one(source_of(PHOTO)), torch.Tensor)


def test_an_answer_that_makes_no_sense_is_not_believed() -> None:
    assert _parsed(b"[true, null]", 2) == [True, None]
    assert _parsed(b'[["bad\\nfile", false]]', 1) == [("bad?file", False)]
    for reply in (
        b"",
        b"{}",
        b"[true]",
        b"[1, 1]",
        b'[["x", 1], null]',
        b"[false, true]",
        b"\xff\xfe",
        b"[[[]], 1]",
    ):
        assert _parsed(reply, 2) is None, reply


def test_every_reason_of_a_death_is_told_to_the_caller_in_its_own_way(decoder: IsolatedDecoder) -> None:
    errors = {reason: decoder._error(reason, source_of(PHOTO)) for reason in DEATHS}
    temporary = {reason for reason, error in errors.items() if error.retryable}
    assert temporary == {"killed", "stuck"}
    assert all(isinstance(error, EncoderError) for error in errors.values())


def test_a_memory_is_emptied_before_another_request_may_have_it() -> None:
    memory, was_free = PixelMemory(128 << 20), list[bool]()
    pixels = [memory.lend(source_of(PHOTO), begin) for begin in (0, 1 << 20)]
    emptied = Changed(memory._bytes, madvise=lambda _: was_free.append(memory.is_free))
    memory._bytes = emptied  # type: ignore[assignment]
    del pixels[0]
    assert (was_free, memory.is_free) == ([], False)
    del pixels[0]
    assert (was_free, memory.is_free) == ([False], True)


def test_a_parent_that_answers_too_late_is_replaced_and_its_answer_is_nobodys() -> None:
    with decoding() as decoder:
        late = psutil.Process(psutil.Process(children(decoder)[0]).ppid())
        decoder._parent._running.control.settimeout(0.1)  # type: ignore[union-attr]
        late.suspend()
        (child,) = decoder._single_children.queue
        child.end()
        if late.is_running():  # it would be, and answer the next question
            late.resume()
        for seed in range(3):
            assert isinstance(decoder.decode_one(source_of(photo(64, 48, seed))), torch.Tensor)
        assert not late.is_running()
