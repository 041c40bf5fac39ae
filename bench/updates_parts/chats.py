"""Chats in closed loops, each with an image, whose answers are compared with those of engines without the service.

An answer is the log-probabilities of its token and of the next likeliest ones, which are as many numbers whatever the
tokens are. It may differ by rounding: engines batch requests as they come.
"""

import json
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, count
from time import monotonic

from bench.engines_parts import sides
from bench.updates_parts.versions import Timeline
from testing.photos import data_url, photo, with_comment

CHATS, PHOTOS, REPEATS = 16, 8, 8
"""The callers, the distinct pictures, and the requests in a row that have one image file, as in a group of GRPO."""
SIDE_PIXELS = 256
LIKELIEST = 5
TOLERANCE = 1e-5
"""Of a log-probability."""
FAR = 100 * TOLERANCE
"""The answers of two versions differ by more, or nothing could be told from them."""
SEED = 7400

Answer = tuple[float, ...]
References = Mapping[str, Sequence[Answer]]
"""The answers of each version to the prompts about all pictures."""


class StatusError(Exception):
    """A request got another status than 200; `retry_s` is what the engine asks to wait."""

    def __init__(self, status: int, message: str, retry_s: float) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.retry_s = retry_s


class Prompts:
    """Prompts about a few pictures. Each `REPEATS` requests share a file that no others have."""

    def __init__(self) -> None:
        self._pictures = [photo(SIDE_PIXELS, SIDE_PIXELS, SEED + number) for number in range(PHOTOS)]

    def picture(self, number: int) -> int:
        """Return the number of the picture in a request."""
        return number // REPEATS % PHOTOS

    def content(self, number: int) -> list[dict[str, object]]:
        """Return the parts of a request. The image comes first, so that every KV block depends on it."""
        picture = self.picture(number)
        file = with_comment(self._pictures[picture], number // REPEATS)
        return [
            {"type": "image_url", "image_url": {"url": data_url(file)}},
            {"type": "text", "text": f"What is in picture {picture}?"},
        ]


def ask(url: str, content: Sequence[Mapping[str, object]]) -> Answer:
    """Send a chat and return the answer. Raises `StatusError`, and `OSError` if the engine does not answer."""
    options = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": LIKELIEST}
    try:
        (choice,) = json.loads(sides.ask(url, content, **options))["choices"]
    except urllib.error.HTTPError as error:
        retry_s = float(error.headers.get("Retry-After", 0))
        raise StatusError(error.code, error.read().decode(errors="replace")[:300], retry_s) from error
    (token,) = choice["logprobs"]["content"]
    return tuple(sorted((each["logprob"] for each in token["top_logprobs"]), reverse=True))


def distance(one: Answer, other: Answer) -> float:
    """Return the largest difference between two answers."""
    return max(abs(ours - theirs) for ours, theirs in zip(one, other, strict=True))


def check_that_versions_differ(references: References) -> None:
    """Raise `RuntimeError` if an answer could be that of two versions: a stale row would not be noticed."""
    for one, other in combinations(references, 2):
        for picture, answers in enumerate(zip(references[one], references[other], strict=True)):
            if distance(*answers) < FAR:
                raise RuntimeError(
                    f"picture {picture}: {one} and {other} have nearly one answer, {answers[0]} and {answers[1]}"
                )


@dataclass
class Outcomes:
    """What the requests of a phase came to."""

    right: Counter[str] = field(default_factory=Counter)
    """Answers of a version that the engine had, by version."""
    stale: list[str] = field(default_factory=list)
    """Answers nearest to a version that it did not have at any time of the request, at any distance."""
    mixed: list[str] = field(default_factory=list)
    """Other answers, of no version."""
    failed: list[str] = field(default_factory=list)
    refused: int = 0
    """Answers of 503, after which the same request was sent again."""
    farthest: float = 0.0
    """The largest distance of an answer to its version, as a share of that to the next version."""

    @property
    def answers(self) -> int:
        """All answers that were compared."""
        return self.right.total() + len(self.stale) + len(self.mixed)

    def summary(self) -> str:
        """Return the counts, and the first of what is wrong."""
        wrong = {"stale": self.stale, "mixed": self.mixed, "failed": self.failed}
        counts = {**self.right, "refused": self.refused, **{name: len(each) for name, each in wrong.items()}}
        return f"{counts} {[each[0] for each in wrong.values() if each]}"


class Chats:
    """The callers of one engine."""

    def __init__(self, url: str, prompts: Prompts, references: References, timeline: Timeline) -> None:
        self._url = url
        self._prompts = prompts
        self._references = references
        self._timeline = timeline
        self._numbers = count()
        self._lock = threading.Lock()

    @contextmanager
    def running(self, *, retry: bool) -> Iterator[Outcomes]:
        """Let all callers send requests for the length of a `with` block; with `retry`, again after a 503."""
        outcomes, ended = Outcomes(), threading.Event()
        with ThreadPoolExecutor(CHATS) as threads:
            callers = [threads.submit(self._call, outcomes, ended, retry) for _ in range(CHATS)]
            try:
                yield outcomes
            finally:
                ended.set()
        for caller in callers:
            caller.result()

    def _call(self, outcomes: Outcomes, ended: threading.Event, retry: bool) -> None:
        while not ended.is_set():
            with self._lock:
                number = next(self._numbers)
            content = self._prompts.content(number)
            while not (self._is_answered(number, content, outcomes, ended, retry) or ended.is_set()):
                pass

    def _is_answered(
        self,
        number: int,
        content: Sequence[Mapping[str, object]],
        outcomes: Outcomes,
        ended: threading.Event,
        retry: bool,
    ) -> bool:
        """Send a request; return whether it has its outcome, else once it may be sent again."""
        began_s = monotonic()
        try:
            answer = ask(self._url, content)
        except StatusError as refused:
            if retry and refused.status == 503:
                with self._lock:
                    outcomes.refused += 1
                ended.wait(refused.retry_s)
                return False
            outcomes.failed.append(str(refused))
        except (OSError, ValueError, KeyError) as error:
            outcomes.failed.append(repr(error))
        else:
            self.judge(outcomes, self._prompts.picture(number), answer, (began_s, monotonic()))
        return True

    def judge(self, outcomes: Outcomes, picture: int, answer: Answer, life_s: tuple[float, float]) -> None:
        """Compare an answer with those of the versions that the engine may have had during the request."""
        versions = self._timeline.between(*life_s)
        distances = {name: distance(answer, each[picture]) for name, each in self._references.items()}
        nearest, next_nearest = sorted(distances, key=distances.__getitem__)[:2]
        said = f"picture {picture}, {sorted(versions)}: {distances}"
        with self._lock:
            outcomes.farthest = max(outcomes.farthest, distances[nearest] / distances[next_nearest])
            if nearest not in versions:
                outcomes.stale.append(said)
            elif distances[nearest] > TOLERANCE:
                outcomes.mixed.append(said)
            else:
                outcomes.right[nearest] += 1
