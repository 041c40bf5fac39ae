"""A tier: random sizes leave it usable."""

import math
import random

import torch

from encoder_service.store.tier import PageLayout, Tier


def test_random_sizes_leave_the_arena_usable_and_most_embeddings_whole():
    rows_per_page = 2
    layout = PageLayout(row_bytes=1, page_rows=rows_per_page)
    # As 8 GiB of 64 KiB pages.
    tier = Tier("host", torch.empty((8 << 14) * rows_per_page, dtype=torch.uint8), layout)
    rng = random.Random(3)
    used, single = [], []
    for number in range(6000):
        tokens = int(math.exp(rng.uniform(math.log(64), math.log(3600))))
        address = number.to_bytes(4, "little")
        while (slot := tier.reserve(address, tokens, (1, 1, 1))) is None:
            next(tier.make_room(address, tokens))
        tier.commit(slot)
        tier.unpin(slot)
        if number % 3 == 0:
            tier.touch(rng.choice(list(tier.entries.values())[-200:]))
        if number > 2000:
            used.append(1 - tier.arena.free_pages / tier.arena.pages)
            single.append(len(slot.runs) == 1)
    assert min(used) >= 0.9
    assert sum(single) / len(single) >= 0.7
