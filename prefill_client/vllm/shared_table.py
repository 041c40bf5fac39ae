"""Which images' rows are here, which are still asked for, and which this engine's own tower makes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefill_client.images import PutAnswer
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.host_memory import Extent, HostMemory
from prefill_client.vllm.image_name import same_image
from prefill_client.vllm.load_plan import Save
from prefill_client.vllm.row_table import Holder
from prefill_client.vllm.shared_store import SharedStore
from prefill_client.vllm.store_session import Asked, Found


@dataclass(eq=False, slots=True)
class SharedImage:
    """An image that requests hold. `lease`: the store waits for its rows."""

    identifier: str
    asked: Asked
    state: Literal["asked", "here", "ours"] = "asked"
    lease: PutAnswer | None = None
    saving: bool = False
    loads: int = 0  # steps under way that copy its rows into a worker
    holders: set[Holder] = field(default_factory=set)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where its rows are, if they are here."""
        return self.asked.extents


class SharedTable:
    """For the scheduler's thread."""

    def __init__(
        self, store: SharedStore, incoming: HostMemory, outgoing: HostMemory, row_bytes: int, counts: Counts
    ) -> None:  # fmt: skip
        self._store = store
        self._incoming = incoming
        self._outgoing = outgoing
        self._row_bytes = row_bytes
        self._counts = counts
        self._images: dict[str, SharedImage] = {}
        self._asked: dict[Asked, SharedImage] = {}
        self._saving: dict[int, tuple[SharedImage, Save]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        saving = (image for image, _ in self._saving.values())
        return len({*self._images.values(), *self._asked.values(), *saving})

    @property
    def fetching(self) -> bool:
        """Whether an answer of the store is on its way."""
        return bool(self._asked)

    def is_here(self, identifier: str) -> bool:
        """Whether an image's rows are in host memory."""
        image = self._images.get(identifier)
        return image is not None and image.state == "here"

    def is_decided(self, identifier: str) -> bool:
        """Whether a step may count on an image: its rows are here, or this engine makes them."""
        image = self._images.get(identifier)
        return image is None or image.state != "asked"

    def hold(self, identifier: str, holder: Holder, asked: Asked) -> None:
        """Keep what is known of an image for `holder`; ask, unless that has begun."""
        image = self._images.get(identifier)
        if image is None:
            image = self._images[identifier] = SharedImage(identifier, asked)
            self._ask(image)
        image.holders.add(holder)

    def drop(self, identifier: str, holder: Holder) -> None:
        """Let go of what `holder` held."""
        image = self._images.get(identifier)
        if image is not None:
            image.holders.discard(holder)
            self._forget_unheld(image)

    def give_back(self, identifier: str) -> None:
        """Let another engine make an image's rows, if this one has the lease; it then makes its own for itself."""
        image = self._images.get(identifier)
        if image is not None and image.lease is not None:
            self._counts.put("waited")
            self._end_lease(image)

    def begin_load(self, identifier: str) -> SharedImage:
        """Keep the rows of an image that is here until `end_load`, whoever holds it."""
        image = self._images[identifier]
        assert image.state == "here", "only what is here is loaded"
        image.loads += 1
        return image

    def end_load(self, image: SharedImage) -> None:
        """The workers have their copies."""
        image.loads -= 1
        self._forget_unheld(image)

    def clashes(self, identifier: str, rows: int) -> bool:
        """Whether `identifier` stands for an image with another number of rows: a caller gave two the same `uuid`."""
        image = self._images.get(identifier)
        return image is not None and image.asked.tokens != rows

    def begin_save(self, identifier: str, data: Mapping[str, Any]) -> Save | None:
        """The tower makes an image's rows of `data` in this step; return where they go, if the store waits for them.

        Without room for them the lease is given back: no step waits for memory. So it is for other data than the store
        was asked about, by a caller who gave two images the same `uuid`.
        """
        image = self._images.get(identifier)
        if image is None or image.lease is None:
            return None
        lease, image.lease = image.lease, None
        is_right = same_image(image.asked.data, data)
        extents = self._outgoing.allocate(image.asked.tokens * self._row_bytes) if is_right else None
        if extents is None:
            self._counts.put("no_room" if is_right else "another_image")
            self._store.give_back(lease)
            return None
        save = Save(extents, next(self._numbers))
        image.saving = True
        self._saving[save.number] = image, save
        self._store.expect(save.number, lease, extents)
        return save

    def take_in(self) -> None:
        """Take in what was found and what was put."""
        for found in self._store.found():
            self._take_found(self._asked.pop(found.asked), found)
        for sent in self._store.sent():
            image, save = self._saving.pop(sent.number)
            self._outgoing.release(save.extents)
            self._counts.put("kept" if sent.error is None else sent.error.status.name.lower())
            image.saving = False
            self._forget(image)  # who needs it after this asks the store

    def _ask(self, image: SharedImage) -> None:
        extents = None
        if not self._store.alone:
            extents = self._incoming.allocate(image.asked.tokens * self._row_bytes)
        if extents is None:
            image.state = "ours"
            self._counts.encoded(shared=False)
            return
        image.asked.extents = extents
        self._asked[image.asked] = image
        self._store.ask(image.asked)

    def _take_found(self, image: SharedImage, found: Found) -> None:
        self._counts.found(found, image.asked.tokens * self._row_bytes)
        image.state = "here" if found.outcome == "here" else "ours"
        image.lease = found.lease
        if image.state == "ours":
            self._incoming.release(image.extents)
        self._forget_unheld(image)

    def _forget_unheld(self, image: SharedImage) -> None:
        if image.holders or image.loads or image.saving:
            return
        self._forget(image)
        if image.asked in self._asked:
            self._store.give_up(image.asked)  # its memory is in use until it is found
        elif image.state == "here":
            self._incoming.release(image.extents)
        self._end_lease(image)

    def _end_lease(self, image: SharedImage) -> None:
        if image.lease is not None:
            self._store.give_back(image.lease)
            image.lease = None

    def _forget(self, image: SharedImage) -> None:
        if self._images.get(image.identifier) is image:
            del self._images[image.identifier]
