"""Fixtures: a checkpoint that SGLang loads, a real server for it, real engines with the server and without."""

import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from prefill_client import BlockingClient, RowRequest
from testing.answers import Part, images_in
from testing.checkpoints import write_checkpoint
from testing.photos import encoded, photo
from testing.sglang_engine import SglangEngine, add_video_processor, package_variables, serving
from tests.engines.answers import ASKED, Own
from tests.sglang.counters import fetches
from tests.vllm.restartable import Restartable

HERE = Path(__file__).parent
HANG_S = 900
"""What a test may take before it counts as hanging: engines start within it, on a machine that does much else."""
SMALL = {
    "qwen3_vl": {"size": {"longest_edge": 65536, "shortest_edge": 1024}},
    "qwen2_5_vl": {"min_pixels": 784, "max_pixels": 65536},
}
DOWNLOAD_S = 300
TURNED, TRANSPARENT = photo(300, 150, 6, orientation=6), photo(200, 220, 7, "PNG", mode="RGBA")


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


ON_WHITE = Image.new("RGB", opened(TRANSPARENT).size, "white")
ON_WHITE.paste(opened(TRANSPARENT), mask=opened(TRANSPARENT).getchannel("A"))


AS_SEEN: dict[str, list[Part]] = {
    "upright": [encoded(ImageOps.exif_transpose(opened(TURNED)), "PNG"), "?"],
    "on white": [encoded(ON_WHITE, "PNG"), "?"],
}
CHUNKS: list[Part] = [
    part for number in range(16) for part in (f"{number}: ", photo(240, 250, 2000 + number))
]
LONG: list[Part] = [
    *("0: ", photo(240, 250, 3000), "b" * 4000),
    *(part for number in range(1, 16) for part in (f"{number}: ", photo(240, 250, 3000 + number))),
]
"""Between its first image and the others are forty chunks of text: time to kill a service in."""
UNREADABLE: dict[str, list[Part]] = {
    "in a chunk with more to come": [
        *("0: ", photo(240, 250, 3100), "c" * 4000, photo(240, 250, 3101, "WEBP"), "d" * 200),
    ],
    "in the last chunk": [*("0: ", photo(240, 250, 3200), "e" * 4000, photo(64, 64, 3201, "WEBP"))],
}
"""Their last image is one that an engine of these tests cannot read itself."""
SIXTY_FOUR: list[Part] = [photo(96, 96, 3300 + number) for number in range(64)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the time limit of this folder's tests. The limit in pyproject.toml is for tests without an engine."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(HANG_S))


def checkpoint_of(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny checkpoint."""
    return add_video_processor(
        write_checkpoint(folder, family, preprocessor=SMALL[family], seed=seed), family
    )


def variables(endpoint: str, *paths: Path, **settings: object) -> dict[str, str]:
    """The environment of an engine that is to use the service, and whose Pillow cannot read WebP.

    `paths` are where it finds packages first.
    """
    found = [*map(str, paths), str(HERE / "without_webp"), os.environ.get("PYTHONPATH", "")]
    return {
        **package_variables(endpoint, **settings),
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
    }


def answers_of(model: Path, prompts: Iterable[Sequence[Part]]) -> Own:
    """Return the answers of an SGLang as it is, by its own tower."""
    with serving(model) as engine:
        answers = {tuple(parts): engine.ask(parts) for parts in prompts}
    return lambda parts: answers[tuple(parts)]


@contextmanager
def service_of(model: Path) -> Iterator[Restartable]:
    """Run a server of a checkpoint; a test that stops it starts it again."""
    service = Restartable(model)
    service.start()
    try:
        yield service
    finally:
        service.kill()


def let_it_encode(service: Restartable, parts: Iterable[Part]) -> dict[bytes, int]:
    """Let the service encode images that are new to the engine, whose cache cannot be emptied.

    Returns the number of tokens of each, once the service has logged its calls.
    """
    images = [*images_in(parts)]
    server = service.process
    before = len(server.lines)
    with BlockingClient.connect(service.endpoint) as client:
        answers = client.submit(images)
        with client.fetch([RowRequest(answer.digest, row_end=1) for answer in answers]) as outcomes:
            assert all(outcome.error is None for outcome in outcomes)
    deadline = time.monotonic() + HANG_S / 2
    while not fetches(server, before):  # logged after its caller has the rows
        assert time.monotonic() < deadline, "the service does not log its Fetch"
        time.sleep(0.01)
    return {image: answer.tokens for image, answer in zip(images, answers, strict=True)}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL."""
    return checkpoint_of("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def own(checkpoint: Path) -> Own:
    """Those of this checkpoint."""
    return answers_of(checkpoint, [*ASKED, *AS_SEEN.values(), LONG, SIXTY_FOUR, *UNREADABLE.values()])


@pytest.fixture(scope="session")
def service(checkpoint: Path) -> Iterator[Restartable]:
    """A server of that checkpoint."""
    with service_of(checkpoint) as service:
        yield service


@pytest.fixture(scope="session")
def engine(checkpoint: Path, service: Restartable, own: object) -> Iterator[SglangEngine]:
    """An engine that takes its images from the service."""
    with serving(checkpoint, environment=variables(service.endpoint)) as engine:
        yield engine


@pytest.fixture(scope="session")
def wheels(pytestconfig: pytest.Config) -> Callable[[str], zipfile.ZipFile]:
    """Return a function that gives the wheel of a release; it is downloaded once (27 to 39 MB)."""
    folder = pytestconfig.cache.mkdir("sglang-wheels")

    def wheel(release: str) -> zipfile.ZipFile:
        if not list(folder.glob(f"sglang-{release}-*.whl")):
            pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", folder]
            subprocess.run([*pip, f"sglang=={release}"], check=True, timeout=DOWNLOAD_S)
        (found,) = folder.glob(f"sglang-{release}-*.whl")
        return zipfile.ZipFile(found)

    return wheel
