"""Stores in the folder of a test, which are closed at its end."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from encoder_service.store import Store
from tests.small_store import NewStore, make_store


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[NewStore]:
    """Return a function that makes a store, with the arguments of `make_store`."""
    with ExitStack() as stack:

        def new(*sizes: int, **settings: Any) -> Store:
            store = make_store(tmp_path, *sizes, **settings)
            stack.callback(store.close)
            return store

        yield new
