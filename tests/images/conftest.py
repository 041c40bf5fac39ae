"""The engine and the images that all tests of this folder share: `make test-images`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.images import build, engine


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, str]]:
    """The built images by target. The engine keeps its layers for the next run."""
    try:
        engine.start()
    except engine.UnavailableEngineError as error:
        pytest.skip(str(error))
    build.build_all()
    yield build.TARGETS
    engine.stop()


@pytest.fixture(scope="session")
def readable_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkpoint that user 10001 may read."""
    folder = tmp_path_factory.mktemp("readable") / "model"
    shutil.copytree(checkpoint, folder)
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder
