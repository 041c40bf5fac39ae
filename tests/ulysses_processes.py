"""Processes that encode an image as a group. They import little, because there are four of them."""

import functools
import multiprocessing
import os
import signal
from typing import Any

import torch

from encoder_service.vision import tower, ulysses
from encoder_service.vision.ulysses import UlyssesGroup, start_rendezvous
from tests import towers
from tests.waiting import START_S

load = functools.cache(towers.load)


def encode(rank, port, number, folder, dtype, grid, leader, patches, *, size, tile, limit_s, at_block):
    """Encode in one process; return its rows or its error. The last process calls `at_block` once."""
    torch.set_num_threads(1)
    blocks = []

    def between():
        blocks.append(rank)
        if at_block is not None and rank == size - 1 and len(blocks) == 3:
            at_block()

    tower.CPU_TILE_PATCHES = tile
    ulysses._RENDEZVOUS_S = START_S  # a process may load its tower first, which is slow on a busy machine
    group = UlyssesGroup(torch.device("cpu"), port, rank, size, limit_s)
    try:
        return load(folder, dtype).encode_in_group(group, number, leader, grid, patches, between)
    except RuntimeError as error:
        return str(error)


def serve(rank, pipe, given_up):
    """Encode the images that come through the pipe. The main function of a process."""
    global others_gave_up
    others_gave_up = given_up
    while True:
        arguments, options = pipe.recv()
        pipe.send(encode(rank, *arguments, **options))


others_gave_up: Any = None  # an event


def hang():
    """Do nothing until the other processes have given up."""
    assert others_gave_up.wait(START_S)


def die():
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Processes:
    """Four processes that load towers once."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(4)]
        self.pipes = [ours for ours, _ in pairs]
        self.given_up = context.Event()
        self.processes = [
            context.Process(target=serve, args=(rank, theirs, self.given_up), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self.rendezvous = start_rendezvous()
        self.number = 0

    def begin(self, folder, dtype, grid, leader, patches, *, size, tile=256, limit_s=START_S, at_block=None):
        """Start to encode an image in `size` processes."""
        self.number += 1
        options = {"size": size, "tile": tile, "limit_s": limit_s, "at_block": at_block}
        for rank, pipe in enumerate(self.pipes[:size]):
            own = patches if rank == leader else None
            pipe.send(((self.rendezvous.port, self.number, folder, dtype, grid, leader, own), options))

    def answer(self, rank):
        """Return the result of a process."""
        assert self.pipes[rank].poll(START_S)
        return self.pipes[rank].recv()

    def encode(self, folder, dtype, grid, leader, patches, **options):
        """Encode an image and return the leader's rows; check that the others get none."""
        self.begin(folder, dtype, grid, leader, patches, **options)
        answers = [self.answer(rank) for rank in range(options["size"])]
        assert all(answer == [] for rank, answer in enumerate(answers) if rank != leader), answers
        [rows] = answers[leader]
        return rows

    def end(self):
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.join()
