"""The store against a simple model: anything anyone may do, in any order."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from encoder_contract.errors import OverloadedError
from encoder_service.store import Pin
from encoder_service.store.copies import copy_bytes
from encoder_service.store.tensors import flat
from testing.stored import write
from tests.small_store import PAGE_BYTES, PAGE_ROWS, embedding, make_store, read

pytestmark = pytest.mark.slow


class StoreMachine(RuleBasedStateMachine):
    """Runs all operations of a store in any order. `versions` is the model: the rows of each held address."""

    pins = Bundle("pins")
    device_pages = 0
    folder: Path

    def __init__(self):
        super().__init__()
        self.evicted = []
        self.store = make_store(
            self.folder, 12, self.device_pages, on_evict=lambda *dropped: self.evicted.append(dropped)
        )
        self.live = []
        self.versions = {}
        self.version = 0
        self.writers = []

    @rule(
        target=pins,
        name=st.integers(0, 9),
        pages=st.sampled_from([0.01, 0.5, 1, 1.5, 3, 4.25, 11]),
        holder=st.sampled_from(["", "a", "b"]),
    )
    def put(self, name, pages, holder):
        address = bytes([name])
        held = self.store.contains(address)
        self.version += 1
        rows = embedding(self.version, pages)
        try:
            pin = write(self.store, address, rows, (1, 1, self.version), holder=holder)
        except OverloadedError:
            self.assert_full(len(rows))
            return None
        if not held:
            self.versions[address] = rows.numpy().tobytes()
        self.live.append(pin)
        return pin

    @rule(name=st.integers(0, 9), pages=st.sampled_from([0.5, 1, 3]), on_host=st.booleans())
    def reserve(self, name, pages, on_host):
        """Begin to write; other writers may have begun to write the address."""
        address = bytes([name])
        self.version += 1
        rows = embedding(self.version, pages)
        found = self.store.reserve(address, len(rows), (1, 1, self.version), "a", on_host=on_host)
        if isinstance(found, Pin):
            assert self.store.contains(address)
            found.release()
        elif found is None:
            self.assert_full(len(rows))
        else:
            copy_bytes(found.tier.pieces(found), [flat(rows)])
            self.writers.append((found, rows.numpy().tobytes()))

    @rule(target=pins, at=st.integers(0, 9))
    def commit(self, at):
        if not self.writers:
            return None
        entry, content = self.writers.pop(at % len(self.writers))
        if not self.store.contains(entry.address):
            self.versions[entry.address] = content
        [pin] = self.store.commit([entry])
        assert pin.address == entry.address
        self.live.append(pin)
        return pin

    @rule(at=st.integers(0, 9))
    def abandon(self, at):
        if self.writers:
            self.store.abandon(self.writers.pop(at % len(self.writers))[0])

    def assert_full(self, rows):
        host = self.store.stats().tiers[-1]
        reserved = sum(entry.pages for entry, _ in self.writers if entry.tier.name == "host") * PAGE_BYTES
        needed = -(-rows // PAGE_ROWS) * PAGE_BYTES
        assert host.size_bytes - host.pinned_bytes - reserved < needed

    @rule(target=pins, name=st.integers(0, 9))
    def pin(self, name):
        pin = self.store.pin(bytes([name]))
        if pin is not None:
            self.live.append(pin)
        return pin

    @rule(pin=pins)
    def to_host(self, pin):
        if pin in self.live:
            try:
                pin.to_host(wait_s=0)
            except OverloadedError:
                assert pin.tier == "device"

    @rule(pin=consumes(pins))
    def release(self, pin):
        if pin is not None:
            pin.release()
            pin.release()
            self.live = [other for other in self.live if other is not pin]

    @rule(name=st.integers(0, 9))
    def evict(self, name):
        address = bytes([name])
        held, pinned = self.store.contains(address), any(pin.address == address for pin in self.live)
        assert self.store.evict(address) == (held and not pinned)
        assert self.store.contains(address) == (held and pinned)

    @rule()
    def flush(self):
        self.store.flush()
        stats = self.store.stats()
        reserved = sum(entry.pages for entry, _ in self.writers) * PAGE_BYTES
        assert sum(tier.used_bytes - tier.pinned_bytes for tier in stats.tiers) == reserved

    @rule()
    def move(self):
        self.store.moves.move_once()

    @invariant()
    def every_pin_reads_the_bytes_that_its_address_had_when_it_was_first_put(self):
        for pin in self.live:
            assert self.store.contains(pin.address)
            slot = pin.entry
            found = b"".join(slot.tier.pieces(slot))
            assert found == self.versions[pin.address]
            if pin.tier == "host":
                assert read(pin) == found

    @invariant()
    def writers_have_the_bytes_that_they_wrote(self):
        for entry, content in self.writers:
            assert b"".join(entry.tier.pieces(entry)) == content

    def entries_of(self, tier):
        return [*tier.entries.values(), *(entry for entry, _ in self.writers if entry.tier is tier)]

    @invariant()
    def no_page_has_two_owners_and_none_is_lost(self):
        for tier in self.store.tiers:
            runs = [run for slot in self.entries_of(tier) for run in slot.runs]
            pages = [page for start, count in runs for page in range(start, start + count)]
            assert len(pages) == len(set(pages))
            assert len(pages) + tier.arena.free_pages == tier.arena.pages

    @invariant()
    def every_page_in_use_counts_against_one_holder(self):
        for tier in self.store.tiers:
            pages = Counter()
            for entry in self.entries_of(tier):
                pages[entry.holder] += tier.layout.pages(entry.tokens)
            assert {name: held for name, (held,) in tier.order.held.items()} == pages

    @invariant()
    def the_numbers_add_up(self):
        stats = self.store.stats()
        assert stats.pins == len(self.live)
        assert len(self.evicted) == sum(tier.evictions for tier in stats.tiers)
        for tier in stats.tiers:
            assert tier.entries == tier.writes - tier.evictions
            assert tier.pinned_bytes <= tier.used_bytes <= tier.size_bytes

    def teardown(self):
        self.store.close()


class TieredStoreMachine(StoreMachine):
    device_pages = 5


@pytest.mark.parametrize("machine", [StoreMachine, TieredStoreMachine])
def test_the_store_matches_its_model_in_any_order_of_steps(machine, tmp_path):
    machine.folder = tmp_path
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
