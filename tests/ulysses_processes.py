"""Processes that encode an image together. They import little, for there are four of them."""

import functools
import multiprocessing
import os
import signal
import time

import torch

from encoder_contract.processor import ProcessorSettings
from encoder_service.vision import load_tower, tower
from encoder_service.vision.ulysses import Group, start_rendezvous
from tests.waiting import START_S


@functools.cache
def load(folder, dtype):
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device="cpu", dtype=dtype, processor=processor)


def encode(rank, port, number, folder, dtype, grid, leader, patches, *, size, tile, limit_s, at_block):
    """What one process does: rows, or the error of the others; `at_block` happens in the last process, once."""
    torch.set_num_threads(1)
    blocks = []

    def between():
        blocks.append(rank)
        if at_block is not None and rank == size - 1 and len(blocks) == 3:
            at_block()

    tower.CPU_TILE_PATCHES = tile
    group = Group(torch.device("cpu"), port, rank, size, limit_s)
    try:
        return load(folder, dtype).encode_in_group(group, number, leader, grid, patches, between)
    except RuntimeError as error:
        return str(error)


def serve(rank, pipe):
    """Encode what comes; a process's target."""
    while True:
        arguments, options = pipe.recv()
        pipe.send(encode(rank, *arguments, **options))


def hang():
    """Let the others wait for longer than they do."""
    time.sleep(3)


def die():
    """Die at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class Processes:
    """Four processes that load towers once."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(4)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(rank, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self.place = start_rendezvous()
        self.number = 0

    def begin(self, folder, dtype, grid, leader, patches, *, size, tile=256, limit_s=START_S, at_block=None):
        """Let `size` of them encode an image."""
        self.number += 1
        options = {"size": size, "tile": tile, "limit_s": limit_s, "at_block": at_block}
        for rank, pipe in enumerate(self.pipes[:size]):
            given = patches if rank == leader else None
            pipe.send(((self.place.port, self.number, folder, dtype, grid, leader, given), options))

    def answer(self, rank):
        """Return what a process found."""
        assert self.pipes[rank].poll(START_S)
        return self.pipes[rank].recv()

    def encode(self, folder, dtype, grid, leader, patches, **options):
        """Return the leader's rows; the others get none."""
        self.begin(folder, dtype, grid, leader, patches, **options)
        answers = [self.answer(rank) for rank in range(options["size"])]
        assert all(answer == [] for rank, answer in enumerate(answers) if rank != leader), answers
        [rows] = answers[leader]
        return rows

    def end(self):
        """End them."""
        for process in self.processes:
            process.kill()
            process.join()
