"""Sixty callers at once with six photos of 3 MB each: twice the files that the service keeps at its defaults."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from testing.photos import encoded
from testing.server_process import running
from tests.vllm.http_engine import PATIENT, HttpEngine, serving
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_middleware import assert_equal, content, top

CALLERS = 60
PHOTOS = 6


def photo_of_noise(seed: int) -> bytes:
    """Return a JPEG of 3 MB with few pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (1024, 1280, 3), np.uint8)
    return encoded(Image.fromarray(noise), "JPEG", quality=95, subsampling=0)


def numbered(photo: bytes, number: int) -> bytes:
    """Return a file with the same pixels and `number` as its comment."""
    return photo[:2] + b"\xff\xfe\x00\x06" + number.to_bytes(4) + photo[2:]


def test_no_request_of_a_burst_fails(checkpoint: Path) -> None:
    photos = [photo_of_noise(seed) for seed in range(PHOTOS)]
    assert min(map(len, photos)) > 2_500_000
    with (
        running(checkpoint, executable=SERVICE, **SETTINGS) as service,
        serving(checkpoint, service.endpoint, **PATIENT) as http,
    ):
        right = ask(http, photos, 0, Counter())
        answers: Counter[int] = Counter()
        together = threading.Barrier(CALLERS)

        def call(number: int) -> Any:
            together.wait()
            return ask(http, photos, number, answers)

        with ThreadPoolExecutor(CALLERS) as pool:
            for found in pool.map(call, range(1, CALLERS + 1)):
                assert_equal(found, right)
        print(f"\n{dict(answers)}, {service.encodes()} images encoded")


def ask(http: HttpEngine, photos: list[bytes], number: int, answers: Counter[int]) -> list[dict[str, float]]:
    """Ask about files that no other caller has; retry after each 503 that says that the queue is full."""
    parts = ["what are these?", *(numbered(photo, number) for photo in photos)]
    while True:
        response = http.chat(content(parts))
        answers[response.status_code] += 1
        if response.status_code != 503:
            assert response.status_code == 200, response.text
            return top(response.json()["choices"][0])
        assert "queue" in response.json()["error"]["message"], response.text
        time.sleep(float(response.headers["retry-after"]))
