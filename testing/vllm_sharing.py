"""Runs a real vLLM engine that encodes images itself and shares the rows of its tower."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from encoder_contract.geometry import grid_of_rows
from prefill_client import BlockingClient, PutAnswer, PutImage
from prefill_client.vllm.service_check import producer_of_engine
from prefill_client.vllm.shared_store import image_key
from testing.vllm_engine import Engine, Part, tower_output

PATIENCE_S = 60.0


class SharingEngine(Engine):
    """An engine with the role `ec_both`; all its images are raw."""

    def __init__(
        self, model: Path, endpoint: str, *, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        settings = {"submit_timeout_s": 30.0, **(extra or {})}
        super().__init__(model, endpoint, role="ec_both", extra=settings, **options)
        self._encoded = [] if self.config.parallel_config.world_size > 1 else tower_output(self)

    @property
    def encoded(self) -> int:
        """The number of images that the tower of this process has encoded."""
        return len(self._encoded)

    def has_lease(self) -> bool:
        """Whether this engine holds the lease of an image that no step encodes yet."""
        return bool(self.side.table._leases)

    def until(self, reached: Callable[[], bool]) -> None:
        """Process the store's answers, without a step, until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, "the condition does not hold in time"
            self.side.table.collect()
            time.sleep(0.005)

    def until_all_is_put(self) -> None:
        """Wait until the table is empty: all puts have ended."""
        self.until(lambda: not len(self.side.table))

    def assert_nothing_is_held(self) -> None:
        """Check that no rows, leases or requests are left."""
        self.until_all_is_put()
        side = self.side
        assert side._incoming.free_bytes == side._incoming.size_bytes
        assert side._outgoing.free_bytes == side._outgoing.size_bytes
        assert not side.gate._prompts
        assert not side.table._saving
        assert not side.store._expected

    def start_all(self, *prompts: Sequence[Part]) -> list[str]:
        """Add requests with raw images to the engine; return their ids."""
        return [self.start(parts, own=True) for parts in prompts]

    def encoded_by(self, *prompts: Sequence[Part]) -> int:
        """Run prompts concurrently; return how many images the tower encodes for them."""
        before = self.encoded
        ended = self.run(*self.start_all(*prompts))
        assert {answer.reason for answer in ended.values()} == {"length"}
        self.until_all_is_put()
        return self.encoded - before

    def feature(self, parts: Sequence[Part]) -> Any:
        """Return the feature of the first image of a prompt, from a request that is aborted at once."""
        (request_id,) = self.start_all(parts)
        (request,) = (each for name, each in self.scheduler.requests.items() if name.startswith(request_id))
        self.abort(request_id)
        return request.mm_features[0]


class OtherEngine:
    """A client that looks like another engine to the store: it has the same producer, and holds leases."""

    def __init__(self, engine: SharingEngine, endpoint: str) -> None:
        self._engine = engine
        self._client = BlockingClient.connect(endpoint)
        self._put = self._client.put(producer_of_engine(engine.config))

    def name(self, parts: Sequence[Part]) -> PutAnswer:
        """Name the first image of a prompt."""
        feature = self._engine.feature(parts)
        grid = grid_of_rows(feature.mm_position.get_num_embeds(), self._client.description.geometry)
        (answer,) = self._put.name([PutImage(grid, engine_key=image_key(feature.data, ""))])
        return answer

    def close(self) -> None:
        """Close the client, which ends its leases."""
        self._put.close()
        self._client.close()
