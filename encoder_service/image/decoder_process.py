"""Decoder processes: a parent that has loaded the decoders, and the children that it forks to use them.

`IsolatedDecoder` starts the parent, which sees no image and lives as long as the server. It loads what decoding needs
once (DALI takes a second), so that a child is there again in milliseconds after one has died. A child decodes one
request at a time, in a sandbox; each way its messages are JSON, one a packet, and the bytes of files and pixels are in
memory that the server shares with it.
"""

import gc
import io
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

# Pillow imports some of these only when an image needs them, which a child cannot do.
from PIL import Image, ImageCms, ImageColor, ImageFilter, ImagePalette, TiffImagePlugin  # noqa: F401

from encoder_contract.errors import InvalidImageError
from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_service.image import sandbox
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.pillow import Pixels, decode_file, turned
from encoder_service.image.readers import READERS
from encoder_service.image.source import Source

MESSAGE_BYTES = 1 << 16
MESSAGE_CHARACTERS = 500  # of an error


def main(control_fd: int, *, dali: bool, threads: int) -> None:
    """Load the decoders, say which, and fork and reap children as told until the server has gone.

    `{"fork": batches, "memory_bytes": n}` comes with the child's end of a socket, and is answered with its pid;
    `{"reap": pid}`, which ends a child that has not ended, with its wait status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A server that was stopped while it starts, or between two commands, may have gone before it is answered.
    with socket.socket(fileno=control_fd) as control, suppress(ConnectionError):
        version = _load(dali=dali)
        gc.freeze()  # what is loaded is no garbage, and stays memory that all children share
        control.send(json.dumps({"dali": version}).encode())
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not message:
                return
            command = json.loads(message)
            if "reap" in command:
                os.kill(command["reap"], signal.SIGKILL)  # one that has ended by itself keeps its status
                answer = {"status": os.waitpid(command["reap"], 0)[1]}
            else:
                parent, pid = os.getpid(), os.fork()
                if pid == 0:
                    control.close()
                    dali_threads = threads if command["fork"] else 0
                    _run_child(descriptors[0], parent, dali_threads, command["memory_bytes"])
                answer = {"pid": pid}
                os.close(descriptors[0])
            control.send(json.dumps(answer).encode())


def _load(*, dali: bool) -> str:
    """Import all that decoding needs, which a child can import no more; return DALI's version, empty without it."""
    for kind in READERS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        decode_file(Source(b"", file.getvalue(), Header(kind, 8, 8, UPRIGHT, 3)))
    if dali:
        # DALI would import torch if it could, which takes seconds and 200 MB, and use nothing of it.
        sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            import nvidia.dali as library
            import nvidia.dali.experimental.dynamic  # noqa: F401
        except ImportError:
            return ""
        return str(library.__version__)
    return ""


def _run_child(descriptor: int, parent: int, dali_threads: int, memory_bytes: int) -> NoReturn:
    code = 1
    try:
        sandbox.end_with_parent("decoder", parent)
        with socket.socket(fileno=descriptor) as server:
            jpegs = _warm(DaliJpegs("cpu", dali_threads)) if dali_threads else None
            sandbox.bound(memory_bytes)
            server.send(json.dumps({"sandbox": sandbox.enter()}).encode())
            _Child(server, jpegs).run()
        code = 0
    except ConnectionError:  # the server has gone before its answer
        pass
    except BaseException:  # noqa: BLE001 - a child must never go on as its parent
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _warm(jpegs: DaliJpegs) -> DaliJpegs:
    """Decode once: it loads code and starts threads."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    for count in (1, 2):
        jpegs.decode([file.getvalue()] * count, list)
    return jpegs


class _Child:
    """Answers requests with an outcome for each file.

    True: its pixels are there. Null: DALI refuses it. Else a text, and whether it is about a lack of memory.
    """

    def __init__(self, server: socket.socket, jpegs: DaliJpegs | None) -> None:
        self._server = server
        self._jpegs = jpegs
        self._memories: dict[int, mmap.mmap] = {}

    def run(self) -> None:
        """Go on until the server closes its end."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._server, MESSAGE_BYTES, 1)
            if not message:
                return
            request = json.loads(message)
            number = request["memory"]
            for descriptor in descriptors:
                self._memories[number] = mmap.mmap(descriptor, request["size"])
                os.close(descriptor)
            outcomes = self._outcomes(self._memories[number], request["files"])
            self._server.send(json.dumps(outcomes).encode())

    def _outcomes(self, memory: mmap.mmap, files: Sequence[dict[str, Any]]) -> list[Any]:
        sources, outs = [], []
        for file in files:
            header, begin = Header(**file["header"]), file["begin"]
            sources.append(Source(b"", memory[begin : begin + file["size"]], header))
            width, height = header.upright
            flat = np.frombuffer(memory, np.uint8, 3 * width * height, file["out"])
            outs.append(flat.reshape(height, width, 3))
        if self._jpegs is not None:
            return self._batch(self._jpegs, sources, outs)
        return [_outcome(source, out) for source, out in zip(sources, outs, strict=True)]

    @staticmethod
    def _batch(jpegs: DaliJpegs, sources: Sequence[Source], outs: Sequence[Pixels]) -> list[bool | None]:
        # Nothing of DALI's outlives `keep`: its memory is free for the next batch.
        def keep(samples: Sequence[Any]) -> list[bool | None]:
            return [
                _kept(np.asarray(np.from_dlpack(sample), np.uint8), source.header, out)
                for sample, source, out in zip(samples, sources, outs, strict=True)
            ]

        try:
            return jpegs.decode([source.data for source in sources], keep)
        except (RuntimeError, MemoryError):
            return [None] * len(sources)


def _outcome(source: Source, out: Pixels) -> Any:
    found = decode_file(source, out)
    if isinstance(found, np.ndarray):
        return True
    return [found.message[:MESSAGE_CHARACTERS], not isinstance(found, InvalidImageError)]


def _kept(pixels: Pixels, header: Header, out: Pixels) -> bool | None:
    """Write what DALI decoded to `out`, upright; None if it has not the size of its header."""
    if pixels.shape != (header.height, header.width, 3):
        return None
    if header.orientation == UPRIGHT:
        out[:] = pixels
    else:
        turned(pixels, header.orientation, out)
    return True
