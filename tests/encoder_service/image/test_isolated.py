"""Decoder processes that die, hang or run out of memory: one image fails, the reason is counted, the rest goes on."""

import fcntl
import json
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

from encoder_contract.errors import EncoderError, InvalidImageError, OverloadedError, UndecodableImageError
from encoder_contract.header import Header
from encoder_service import child as child_module
from encoder_service.devices.job_queue import FailureCache
from encoder_service.image import decoder_child
from encoder_service.image.decoder import DEATHS
from encoder_service.image.decoder_child import (
    PASSED_ON,
    SETTINGS,
    DecoderChild,
    DecoderStartError,
    StderrPipe,
    parse_reply,
)
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.shared_buffer import SharedBuffer
from encoder_service.keys import ImageKey
from testing.decoding import decode_files, pillow_decoder, source_of
from testing.photos import damaged, encoded, photo, pixels
from tests.waiting import START_S

PHOTO = photo(120, 80, 1)


@contextmanager
def decoding(threads: int = 1, **settings: Any) -> Iterator[DecoderPool]:
    pool = DecoderPool(threads, **settings)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    with decoding() as pool:
        yield pool


def children(pool: DecoderPool) -> list[int]:
    """Return the pids of the pool's processes; the last is the next to decode."""
    return [child.ready().pid for child in pool._idle]


def of_cpu(pool: DecoderPool) -> Decoder:
    return Decoder(torch.device("cpu"), pool)


SIOCOUTQ = 0x5411  # from <linux/sockios.h>: how many sent bytes the receiver has not read yet


def while_stopped(pool: DecoderPool, work: Callable[[], Any], *signals: int) -> Any:
    """Stop the next process to decode, run `work` until it has sent a request, send the signals; return its result."""
    process = pool._idle[-1].ready()
    os.kill(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    while not int.from_bytes(fcntl.ioctl(process.channel, SIOCOUTQ, bytes(4)), sys.byteorder):
        time.sleep(0.01)
    for number in signals:
        os.kill(process.pid, number)
    thread.join()
    return results[0]


def deaths(pool: DecoderPool) -> dict[str, int]:
    return {reason: count for reason, count in pool.deaths.items() if count}


def test_files_have_the_same_outcome_as_in_this_process(pool: DecoderPool) -> None:
    """Of damaged ones too, and pixels do not change while other images are decoded."""
    files = [photo(64 + seed, 48, seed) for seed in range(6)] + [damaged(seed) for seed in range(150)]
    found, expected = decode_files(of_cpu(pool), files), decode_files(pillow_decoder(), files)
    assert all(isinstance(each, torch.Tensor) for each in found[:6])
    for isolated_one, in_process in zip(found, expected, strict=True):
        assert type(isolated_one) is type(in_process)
        if isinstance(in_process, torch.Tensor):
            assert isinstance(isolated_one, torch.Tensor)
            assert torch.equal(isolated_one, in_process)


def test_a_killed_decoder_is_replaced_and_its_image_can_be_retried(pool: DecoderPool) -> None:
    before, pid = deaths(pool).get("killed", 0), children(pool)[-1]
    outcome = while_stopped(pool, lambda: pool.decode(source_of(PHOTO)), signal.SIGKILL)
    assert isinstance(outcome, OverloadedError)
    assert outcome.retryable
    assert deaths(pool)["killed"] == before + 1
    assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)
    assert pid not in children(pool)
    assert not psutil.pid_exists(pid), "the process was not reaped"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_decoder_that_died_idle_is_not_the_images_fault(pool: DecoderPool, number: signal.Signals) -> None:
    pid = children(pool)[-1]
    os.kill(pid, number)
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert isinstance(pool.decode(source_of(PHOTO)), OverloadedError)
    assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)


def test_the_spare_decodes_while_a_killed_decoder_is_replaced(pool: DecoderPool) -> None:
    spare, used = children(pool)
    os.kill(used, signal.SIGKILL)
    assert isinstance(pool.decode(source_of(PHOTO)), OverloadedError)
    assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)
    replaced, other = children(pool)
    assert other == spare
    assert replaced not in (spare, used)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_crashing_decoder_fails_its_image_and_the_failure_is_cached(
    pool: DecoderPool, number: signal.Signals
) -> None:
    before = deaths(pool).get("crashed", 0)
    outcome = while_stopped(pool, lambda: pool.decode(source_of(PHOTO)), number, signal.SIGCONT)
    assert isinstance(outcome, UndecodableImageError)
    assert not outcome.retryable
    assert deaths(pool)["crashed"] == before + 1
    failures, key = FailureCache(), ImageKey(b"a" * 32, b"d" * 32)
    failures.note(key, outcome)
    with pytest.raises(UndecodableImageError, match="crashed while decoding this JPEG"):
        failures.check(replace(key, address=b"of another variant"))
    assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)


def test_a_hanging_decoder_is_replaced_while_another_decodes() -> None:
    with decoding(threads=2, cpu_s=1) as pool:
        stopped = children(pool)[-1]  # the next to decode
        os.kill(stopped, signal.SIGSTOP)
        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(pool.decode, [source_of(PHOTO)] * 2))
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["OverloadedError", "ndarray"]
        assert deaths(pool) == {"stuck": 1}
        assert stopped not in children(pool)
        assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)


def heavy() -> bytes:
    """Return nine megapixels that take hundreds of megabytes and a second to decode."""
    noise = np.random.default_rng(1).integers(0, 255, (150, 150, 3), np.uint8)
    return encoded(Image.fromarray(noise).resize((3000, 3000)), "JPEG2000")


def test_an_image_that_takes_too_much_time_or_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    file = heavy()
    monkeypatch.setattr(decoder_child, "_WALL_S", 60.0)  # on a busy machine it may wait long for a core
    with decoding(cpu_s=0.05) as pool:
        slow = pool.decode(source_of(file))
        assert isinstance(slow, UndecodableImageError)
        assert "more than 0.05 s of CPU time" in slow.message
        assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)
        assert deaths(pool) == {"time": 1}
    monkeypatch.setattr(decoder_child, "BASE_BYTES", 32 << 20)
    with decoding(max_image_pixels=10_000) as pool:
        large = pool.decode(source_of(file))
        assert isinstance(large, UndecodableImageError)
        assert "more memory than" in large.message
        assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)
        assert deaths(pool) == {"memory": 1}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "RGB"), ("PNG", "RGBA"), ("WEBP", "RGB"), ("GIF", "P"), ("BMP", "P"), ("TIFF", "L")],
)
def test_a_damaged_image_is_not_too_large(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture alone takes more than a process may have beside the formula, as with 64 megapixels."""
    monkeypatch.setattr(decoder_child, "BASE_BYTES", 32 << 20)
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    file = bytearray(encoded(Image.linear_gradient("L").resize((4000, 3000)).convert(mode), kind, **options))
    half = len(file) // 2
    file[half : half + 1000] = bytes(1000)
    if kind not in ("WEBP", "TIFF"):  # without their ends, these are refused at once
        del file[len(file) * 2 // 3 :]
    source = source_of(bytes(file))
    with decoding() as pool:
        outcome = pool.decode(source)
        assert type(outcome) is InvalidImageError
        assert f"damaged or truncated {kind}" in outcome.message
        assert deaths(pool) == {}


def test_close_ends_every_process_and_a_further_use_starts_them_again() -> None:
    others = {each.pid for each in psutil.Process().children(recursive=True)}

    def ours() -> list[int]:
        return [each.pid for each in psutil.Process().children(recursive=True) if each.pid not in others]

    with decoding() as pool:
        assert len(ours()) == 2  # one for the thread, and the spare
        pool.close()
        assert ours() == []
        assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)
    assert ours() == []


def test_a_decoder_that_is_loading_ends_silently_with_its_server() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = (
        "from encoder_service.image.decoder_process import main; "
        f"main([{theirs.fileno()}], parent={os.getpid()}, memory_bytes=1 << 30)"
    )
    command = [sys.executable, "-c", program]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        ours.close()
        assert process.communicate(timeout=START_S)[1] == b""
    assert process.returncode == 0


def test_decoding_opens_no_descriptors_after_start() -> None:
    with decoding(threads=2) as pool, ThreadPoolExecutor(2) as threads:
        list(threads.map(str, range(8)))
        before = psutil.Process().num_fds()
        for side in (64, 500, 900):  # the last needs a larger buffer than the first one
            files = [source_of(photo(side, side, seed)) for seed in range(6)]
            assert all(isinstance(each, np.ndarray) for each in threads.map(pool.decode, files))
        assert psutil.Process().num_fds() <= before


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


@pytest.mark.attack("code in a decoder process that looks for the server's passwords")
def test_decoder_processes_inherit_at_most_six_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCSVC_INDEX", "rediss://encoder:secret@redis")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/libraries")
    with decoding() as pool:
        for pid in children(pool):
            assert environment(pid).keys() <= {*SETTINGS, *PASSED_ON}
            assert environment(pid)["LD_LIBRARY_PATH"] == "/opt/libraries"
    assert len({*SETTINGS, *PASSED_ON}) == 6


@pytest.mark.attack("a file that makes a library print without end")
def test_output_of_libraries_is_counted_and_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    noisy = bytearray(
        encoded(Image.fromarray(pixels(400, 300, 1)).convert("1"), "TIFF", compression="tiff_ccitt")
    )
    noisy[8:1000] = bytes(range(248)) * 4  # the pixels, behind the header
    with decoding() as pool:
        before = pool.messages
        pool.decode(source_of(bytes(noisy)))
        assert pool.messages > before
    assert capfd.readouterr().err == ""


def test_the_error_says_why_no_decoder_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_child, "_MODULE", "no.such.module")
    pool = DecoderPool(1)
    with pytest.raises(DecoderStartError, match="No module named 'no'"):
        pool.start()


@pytest.mark.attack("a file on which the decoder hangs")
def test_a_hanging_idle_decoder_is_replaced_long_before_its_limit() -> None:
    with decoding(cpu_s=10 * START_S) as pool:
        stopped = children(pool)[-1]
        os.kill(stopped, signal.SIGSTOP)
        outcomes: list[Any] = []
        thread = threading.Thread(target=lambda: outcomes.append(pool.decode(source_of(PHOTO))), daemon=True)
        thread.start()
        thread.join(START_S)
        assert [type(outcome) for outcome in outcomes] == [OverloadedError]
        assert deaths(pool) == {"stuck": 1}
        assert isinstance(pool.decode(source_of(PHOTO)), np.ndarray)


def test_a_decoder_that_is_stopped_while_it_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    program = child_module._PROGRAM
    with ThreadPoolExecutor(1) as launcher:
        child = DecoderChild(launcher, StderrPipe(), memory_bytes=256 << 20, cpu_s=1)
        stopping = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); "
        monkeypatch.setattr(child_module, "_PROGRAM", stopping + program)
        child.launch()
        assert child._launched is not None
        stopped = child._launched.result().pid
        monkeypatch.setattr(child_module, "_PROGRAM", program)
        try:
            assert child.ready().pid != stopped
            assert not psutil.pid_exists(stopped)
        finally:
            child.end()


def test_an_invalid_decoder_answer_is_rejected() -> None:
    assert parse_reply(b"null") is None
    assert parse_reply(b'["bad\\nfile", false]') == ("bad?file", False)
    header = {"format": "TIFF", "width": 3, "height": 4, "orientation": 1, "channels": 3}
    assert parse_reply(json.dumps(header).encode()) == Header("TIFF", 3, 4, 1, 3)
    wrong = ({"width": "3"}, {"height": 0}, {"width": 1 << 64}, {"format": None}, {"channels": 1.5})
    replies = (b"{}", b"true", b"[null]", b'["x", 1]', b'["x"]', b'["x", false, true]')
    no_json = (b"", b"\xff\xfe", b"[" * 60_000)
    for reply in (*replies, *no_json, *(json.dumps(header | each).encode() for each in wrong)):
        with pytest.raises((ValueError, RecursionError)):
            parse_reply(reply)


def test_every_reason_of_a_decoder_death_has_its_own_error(pool: DecoderPool) -> None:
    errors = {reason: pool._death_error(reason, "decoding this JPEG", "1 s", 1) for reason in DEATHS}
    temporary = {reason for reason, error in errors.items() if error.retryable}
    assert temporary == {"killed", "stuck"}
    assert all(isinstance(error, EncoderError) for error in errors.values())


def test_the_pages_of_a_large_buffer_are_freed_before_another_request_uses_it() -> None:
    buffer, was_free = SharedBuffer(128 << 20), list[bool]()
    width, height = source_of(PHOTO).header.upright
    pixels = [buffer.lend((height, width, 3), offset) for offset in (0, 1 << 20)]
    buffer._free_pages = lambda: was_free.append(buffer.is_free)  # type: ignore[method-assign]
    del pixels[0]
    assert (was_free, buffer.is_free) == ([], False)
    del pixels[0]
    assert (was_free, buffer.is_free) == ([False], True)


def test_freeing_pages_releases_the_gil() -> None:
    """The event loop must run meanwhile. With this switch interval, threads change only where one releases the GIL."""
    buffer, counted, is_over = SharedBuffer(256 << 20), 0, threading.Event()

    def run() -> None:
        nonlocal counted
        while not is_over.wait(0):
            counted += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(600.0)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(100):  # on a busy machine the other thread may get no core meanwhile
            buffer.write(bytes(buffer.size))
            before = counted
            buffer._free_pages()
            if counted > before:
                break
        assert counted > before
        assert bytes(buffer._bytes[:1]) == b"\0"
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
