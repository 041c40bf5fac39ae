"""Stores whose rows lie in shared memory, and on a device: a memory file stands in for the device's memory."""

import pytest

from tests.rows_by_handle import make_store


@pytest.fixture
def shm(tmp_path):
    """A store in shared memory."""
    store = make_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def device(tmp_path):
    """A store with a device tier."""
    store = make_store(tmp_path, pages=64, device_pages=16)
    yield store
    store.close()


@pytest.fixture(params=["shm", "device"])
def store(request):
    return request.getfixturevalue(request.param)
