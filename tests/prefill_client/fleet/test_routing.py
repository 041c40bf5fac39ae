"""Routing: consistent choices, little movement, bounded load, and servers that are down."""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_contract.digest import content_digest
from encoder_contract.errors import UnavailableError
from encoder_service.app import Server
from encoder_service.scheduler.admission import RECENT_S, Rate
from prefill_client import EncoderClient, RowRequest
from prefill_client.fleet import routing
from prefill_client.fleet.routing import EQUAL_RATES, FIRST_BACKOFF_S, IDLE_IMAGES, LAST_BACKOFF_S, Router
from prefill_client.images import Image
from prefill_client.transport.connection import Connection
from testing.photos import photo, with_comment
from tests.calls import all_connect, collect
from tests.processes import run

ENDPOINTS = [f"encoder-{n}.encoders:50051" for n in range(5)]
DIGESTS = [content_digest(b"%d" % n) for n in range(5000)]

some_endpoints = st.lists(
    st.integers(0, 10_000).map(lambda n: f"10.0.0.1:{n}"), min_size=2, max_size=8, unique=True
)
some_digest = st.binary(min_size=32, max_size=32)


def first(router: Router, digest: bytes) -> str:
    return router.order(digest)[0]


def timeless(endpoints: Sequence[str]) -> Router:
    """A router for which no time passes: endpoints that are down stay down, however long the test takes."""
    return Router(endpoints, clock=lambda: 0.0)


@given(endpoints=some_endpoints, digest=some_digest, data=st.data())
def test_the_order_is_independent_of_how_endpoints_are_listed(
    endpoints: list[str], digest: bytes, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(endpoints))
    assert Router(endpoints).order(digest) == Router(shuffled).order(digest)
    assert sorted(Router(endpoints).order(digest)) == sorted(endpoints)


@given(endpoints=some_endpoints, digest=some_digest, data=st.data())
def test_removing_an_endpoint_moves_only_its_images_to_their_next_choice(
    endpoints: list[str], digest: bytes, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(endpoints))
    before = Router(endpoints).order(digest)
    after = Router([name for name in endpoints if name != gone]).order(digest)
    assert after == [name for name in before if name != gone]


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([0, 0, 100, 1000])), min_size=3, max_size=30
    ),
    down=st.sets(st.integers(0, 29)),
    digests=st.lists(some_digest, min_size=1, max_size=20),
    bounded=st.booleans(),
)
def test_a_choice_among_the_best_endpoints_is_that_among_all(
    loads: list[tuple[int, int]], down: set[int], digests: list[bytes], bounded: bool
) -> None:
    """Only a few endpoints of each image are sorted, unless none of them takes the image."""

    def placed(best: int) -> list[str]:
        router = timeless([f"10.0.0.1:{at}" for at in range(len(loads))])
        for at, (images, rate) in enumerate(loads):
            router.begin(f"10.0.0.1:{at}", images)
            router.set_rate(f"10.0.0.1:{at}", rate)
            if at in down:
                router.mark_down(f"10.0.0.1:{at}")
        with patch.object(routing, "BEST", best):
            return router.place(digests, bounded=bounded)

    assert placed(2) == placed(1000)


def test_another_process_makes_the_same_choices() -> None:
    code = (
        "from prefill_client.fleet.routing import Router\n"
        "from encoder_contract.digest import content_digest\n"
        f"router = Router({ENDPOINTS!r})\n"
        "print([router.order(content_digest(b'%d' % n)) for n in range(100)])\n"
    )
    assert run("python", "-c", code).stdout.strip() == str(
        [Router(ENDPOINTS).order(digest) for digest in DIGESTS[:100]]
    )


def test_images_and_those_of_a_lost_endpoint_spread_evenly() -> None:
    router = timeless(ENDPOINTS)
    counts = Counter(first(router, digest) for digest in DIGESTS)
    # 5000 images over 5 endpoints: 1000 each, with a standard deviation of 28. The tolerance is five of these.
    assert all(abs(counts[name] - 1000) < 142 for name in ENDPOINTS)
    orphans = [digest for digest in DIGESTS if first(router, digest) == ENDPOINTS[0]]
    router.mark_down(ENDPOINTS[0])
    heirs = Counter(first(router, digest) for digest in orphans)
    assert set(heirs) == set(ENDPOINTS[1:])
    assert max(heirs.values()) < 1.4 * min(heirs.values())


@settings(max_examples=30, deadline=None)
@given(
    endpoints=some_endpoints,
    images=st.lists(st.integers(0, 3), min_size=1, max_size=300),
    idle=st.integers(1, 8),
    ends=st.lists(st.booleans(), min_size=300, max_size=300),
)
def test_no_endpoint_exceeds_its_bound_for_any_hot_image(
    endpoints: list[str], images: list[int], idle: int, ends: list[bool]
) -> None:
    router = Router(endpoints, idle_images=idle)
    under_way: Counter[str] = Counter()
    for image, one_ends in zip(images, ends, strict=False):
        bound = router.bound()
        (chosen,) = router.place([DIGESTS[image]])
        under_way[chosen] += 1
        assert under_way[chosen] <= bound
        if one_ends:
            under_way[chosen] -= 1
            router.end(chosen)


def test_a_hot_image_spreads_in_order_once_its_first_server_is_busy() -> None:
    router = Router(ENDPOINTS)
    preferred = router.order(DIGESTS[0])
    chosen = [router.place([DIGESTS[0]])[0] for _ in range(200)]
    assert chosen[:IDLE_IMAGES] == [preferred[0]] * IDLE_IMAGES
    counts = Counter(chosen)
    assert set(counts) == set(preferred[:4])  # four times 1.25 shares are all there is
    assert max(counts.values()) <= 1.25 * 201 / 5 + 1
    for name, count in counts.items():
        router.end(name, count)
    assert router.order(DIGESTS[0]) == preferred


@given(
    endpoints=some_endpoints,
    images=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    down=st.integers(0, 3),
)
def test_the_images_of_a_call_are_spread_evenly_over_the_servers_that_are_up(
    endpoints: list[str], images: list[int], down: int
) -> None:
    router = timeless(endpoints)
    for name in endpoints[1 : down + 1]:
        router.mark_down(name)
    up = [name for name in endpoints if router.is_up(name)]
    placed = router.place([DIGESTS[image] for image in images])
    by_image = dict(zip(images, placed, strict=True))
    assert placed == [by_image[image] for image in images], "equal digests go to one endpoint"
    counts = Counter(by_image.values())
    assert set(counts) <= set(up)
    assert max(counts.values()) <= -(-len(by_image) // len(up))


@given(endpoints=some_endpoints, digest=some_digest)
def test_a_single_image_goes_to_its_first_choice(endpoints: list[str], digest: bytes) -> None:
    router = Router(endpoints)
    assert router.place([digest]) == [first(router, digest)]
    assert router.place([digest] * 5)[-1] == first(router, digest)


def test_images_beyond_a_share_go_to_their_next_choice() -> None:
    router = Router(ENDPOINTS[:3])
    crowd = [digest for digest in DIGESTS if first(router, digest) == ENDPOINTS[0]][:3]
    assert router.place(crowd)[0] == ENDPOINTS[0]
    order = router.order(crowd[1])
    assert router.place(crowd)[1] == order[1]


def test_images_that_a_server_has_stay_there_when_a_chat_grows() -> None:
    router = Router(ENDPOINTS[:4])
    sent: dict[bytes, str] = {}
    for turn in range(1, 9):
        history = DIGESTS[: 2 * turn]
        placed = dict(zip(history, router.place(history, sent.get), strict=True))
        assert sent.items() <= placed.items()
        sent = placed
    there = dict.fromkeys(DIGESTS[100:109], ENDPOINTS[0])
    assert Router(ENDPOINTS).place(list(there), there.get) == [ENDPOINTS[0]] * 9, "also more than its share"


def test_without_a_bound_load_does_not_move_images() -> None:
    router = Router(ENDPOINTS)
    home = router.order(DIGESTS[0])[0]
    for _ in range(200):
        assert router.place([DIGESTS[0]], bounded=False) == [home]
    assert router.place([DIGESTS[0]]) != [home]


def test_endpoints_that_are_down_come_last_until_they_return() -> None:
    now = 0.0
    router = Router(ENDPOINTS, clock=lambda: now)
    preferred = router.order(DIGESTS[0])
    router.mark_down(preferred[0])
    assert router.order(DIGESTS[0]) == preferred[1:] + preferred[:1]
    assert not router.is_up(preferred[0])
    now = FIRST_BACKOFF_S
    assert router.is_up(preferred[0])
    assert router.order(DIGESTS[0]) == preferred
    router.mark_down(preferred[0])
    router.mark_up(preferred[0])
    assert router.order(DIGESTS[0]) == preferred


def test_if_all_endpoints_are_down_the_first_to_be_retried_comes_first() -> None:
    now = 0.0
    router = Router(ENDPOINTS[:3], clock=lambda: now)
    for n, name in enumerate(ENDPOINTS[:3]):
        now = n / 10
        router.mark_down(name)
    assert router.order(DIGESTS[0]) == ENDPOINTS[:3]


def test_consecutive_failures_double_the_backoff_up_to_its_bound() -> None:
    now = 0.0
    router = Router(ENDPOINTS[:1], clock=lambda: now)
    waits = []
    for _ in range(10):
        router.mark_down(ENDPOINTS[0])
        router.mark_down(ENDPOINTS[0])  # the same outage, seen by another call
        begun = now
        while not router.is_up(ENDPOINTS[0]):
            now += 0.25
        waits.append(now - begun)
    assert waits == [0.5, 1, 2, 4, 8, 16, LAST_BACKOFF_S, LAST_BACKOFF_S, LAST_BACKOFF_S, LAST_BACKOFF_S]
    router.mark_up(ENDPOINTS[0])
    router.mark_down(ENDPOINTS[0])
    now += 0.5
    assert router.is_up(ENDPOINTS[0])


def test_health_ends_an_outage_but_only_a_call_ends_a_backoff() -> None:
    now = 0.0
    router = Router(ENDPOINTS[:1], clock=lambda: now)
    (name,) = ENDPOINTS[:1]

    def waited_after_a_failure() -> float:
        """Fail a call, report serving by the health check, and return how long the endpoint stays down."""
        nonlocal now
        assert router.is_up(name)
        router.failed(name)
        router.mark_up(name)
        begun = now
        while not router.is_up(name):
            now += 0.25
        return now - begun

    assert [waited_after_a_failure() for _ in range(5)] == [0, 0.5, 1, 2, 4]
    router.succeeded(name)
    assert [waited_after_a_failure() for _ in range(2)] == [0, 0.5]
    for _ in range(20):  # restarts that no call has met
        router.mark_down(name)
        router.mark_up(name)
        router.succeeded(name)
        assert router.is_up(name)
    now += 1000
    for _ in range(3):
        router.failed(name)
        now += 30
    router.succeeded(name)  # with no health check at all
    router.failed(name)
    now += FIRST_BACKOFF_S
    assert router.is_up(name)


@pytest.fixture
async def three_names(server: Server) -> AsyncIterator[tuple[EncoderClient, list[str]]]:
    """A client of a fleet of three endpoints, which are one server with three names."""
    port = server.endpoint.rpartition(":")[2]
    names = [f"{host}:{port}" for host in ("127.0.0.1", "localhost", "ipv4:127.0.0.1")]
    async with await EncoderClient.connect(names) as client:
        await all_connect(client)
        yield client, names


def recording(method: Callable[..., Any], servers: dict[bytes, list[str]]) -> Callable[..., Any]:
    """Return `method`, recording the server of each attempt at an image by the image's digest."""

    def recorded(self: Connection, images: Sequence[Image | RowRequest], *rest: Any, **more: Any) -> Any:
        for image in images:
            servers.setdefault(image.digest, []).append(self.endpoint)
        return method(self, images, *rest, **more)

    return recorded


async def test_a_large_submit_and_fetch_respect_the_bound_of_every_server(
    three_names: tuple[EncoderClient, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, names = three_names
    router = client._pool.router
    files = (with_comment(photo(64, 64, 1), number) for number in itertools.count())
    hot = list(itertools.islice((f for f in files if first(router, content_digest(f)) == names[0]), 60))
    submits: dict[bytes, list[str]] = {}
    fetches: dict[bytes, list[str]] = {}
    monkeypatch.setattr(Connection, "submit", recording(Connection.submit, submits))
    monkeypatch.setattr(Connection, "fetch", recording(Connection.fetch, fetches))
    submitted = await client.submit(hot)
    assert not [image.error for image in submitted if image.error]
    # On a busy machine an attempt may fail. Its images are then placed again, with a new bound.
    placed = Counter(servers[0] for servers in submits.values())
    assert (placed.total(), set(placed)) == (60, set(names))
    assert max(placed.values()) <= 1.25 * 60 / 3
    assert router.bound() == IDLE_IMAGES  # no image is in progress now
    accepted_by = {digest: servers[-1] for digest, servers in submits.items()}
    await all_connect(client)
    await collect(client, [RowRequest(image.digest) for image in submitted])
    assert {digest: servers[0] for digest, servers in fetches.items()} == accepted_by
    assert router.bound() == IDLE_IMAGES


def test_a_dns_update_keeps_the_state_of_remaining_endpoints() -> None:
    router = timeless(ENDPOINTS)
    router.begin(ENDPOINTS[1], 100)
    router.mark_down(ENDPOINTS[2])
    router.set_endpoints([*ENDPOINTS[1:], "new:1"])
    assert set(router.endpoints) == {*ENDPOINTS[1:], "new:1"}
    assert not router.is_up(ENDPOINTS[2])
    assert all(first(router, digest) != ENDPOINTS[1] for digest in DIGESTS[:100])
    router.end(ENDPOINTS[0])  # was in progress when the endpoint was removed
    assert not router.is_up(ENDPOINTS[0])
    router.mark_down(ENDPOINTS[0])
    router.mark_up("never known")


def test_without_endpoints_place_raises_unavailable() -> None:
    assert Router([]).order(DIGESTS[0]) == []
    with pytest.raises(UnavailableError):
        Router([]).place([DIGESTS[0]])


# Servers of different speeds

RATES = dict(zip(ENDPOINTS, (1200.0, *[100.0] * 4), strict=True))


def rated(rates: dict[str, float] = RATES) -> Router:
    router = Router(rates)
    for name, rate in rates.items():
        router.set_rate(name, rate)
    return router


def test_each_server_is_first_for_images_in_proportion_to_its_rate() -> None:
    counts = Counter(first(rated(), digest) for digest in DIGESTS)
    # 5000 images, three quarters to the fast server: a standard deviation of 31. The tolerance is five of these.
    assert abs(counts[ENDPOINTS[0]] - 3750) < 155
    assert all(abs(counts[name] - 312) < 86 for name in ENDPOINTS[1:])


@given(
    rates=st.dictionaries(st.integers(0, 99).map(lambda n: f"10.0.0.1:{n}"), st.floats(1, 1e6), min_size=2),
    digest=some_digest,
    data=st.data(),
)
def test_removing_a_rated_endpoint_moves_only_its_images(
    rates: dict[str, float], digest: bytes, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(list(rates)))
    left = {name: rate for name, rate in rates.items() if name != gone}
    has_equal = [max(some.values()) < EQUAL_RATES * min(some.values()) for some in (rates, left)]
    if has_equal[0] == has_equal[1]:
        assert rated(left).order(digest) == [name for name in rated(rates).order(digest) if name != gone]


@given(rates=st.lists(st.floats(1, 1.49), min_size=5, max_size=5), digest=some_digest)
def test_similar_and_unknown_rates_change_nothing(rates: list[float], digest: bytes) -> None:
    unrated = Router(ENDPOINTS).order(digest)
    assert rated(dict(zip(ENDPOINTS, rates, strict=True))).order(digest) == unrated
    assert rated({**dict.fromkeys(ENDPOINTS, 0.0), ENDPOINTS[0]: 5.0}).order(digest) == unrated


def test_a_new_server_counts_as_the_slowest_known_one() -> None:
    router = rated(RATES | {ENDPOINTS[2]: 0.0})
    assert [router.order(digest) for digest in DIGESTS[:200]] == [rated().order(d) for d in DIGESTS[:200]]


def test_a_call_is_shared_by_rate_and_waits_for_no_slow_server() -> None:
    for count in (1, 2, 5, 8, 16, 32, 64):
        placed = Counter(rated().place(DIGESTS[:count]))
        for slow in ENDPOINTS[1:]:  # a sixteenth each, in whole images
            assert placed[slow] <= count / 16
        assert sum(placed.values()) == count
    assert {rated().place([digest])[0] for digest in DIGESTS[:100]} == {ENDPOINTS[0]}


def test_slow_servers_get_single_images_when_the_fast_one_is_busy() -> None:
    router = rated()
    placed = Counter(router.place([digest])[0] for digest in DIGESTS[:640])
    assert 400 < placed[ENDPOINTS[0]] < 560, "about three quarters are there"
    assert all(20 < placed[name] < 60 for name in ENDPOINTS[1:])


def test_the_bound_of_a_server_follows_its_rate() -> None:
    router = rated()
    router.begin(ENDPOINTS[0], 750)
    assert router.bound(250) == pytest.approx(1.25 * 1000 * 0.75, abs=1)
    assert router.bound(250, 1 / 12) == pytest.approx(1.25 * 1000 / 16, abs=1)
    assert Router(ENDPOINTS).bound(1, 1 / 12) < IDLE_IMAGES


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 1e30])
def test_a_rate_that_cannot_be_one_is_ignored_and_counted(
    rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    router, digests = rated(), DIGESTS[:200]
    before = [router.order(digest) for digest in digests]
    for _ in range(3):
        router.set_rate(ENDPOINTS[3], rate)
    router.set_rate("unknown", 5.0)
    assert [router.order(digest) for digest in digests] == before
    assert router.ignored_rates == 3
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{ENDPOINTS[3]}: ignored its rate")


def test_noise_moves_no_images() -> None:
    router, digests = rated(), DIGESTS[:500]
    before = [router.order(digest) for digest in digests]
    for number in range(100):
        router.set_rate(ENDPOINTS[number % 5], RATES[ENDPOINTS[number % 5]] * (0.85 + 0.3 * (number % 7) / 6))
    assert [router.order(digest) for digest in digests] == before


@pytest.mark.parametrize("batch_s", [0.01, 0.1, 0.5])
def test_a_server_whose_rate_halves_is_relieved_within_two_seconds(batch_s: float) -> None:
    rates = {name: Rate(RECENT_S) for name in ENDPOINTS}
    router = Router(ENDPOINTS)
    for second in range(int(12 / batch_s)):
        for name, rate in rates.items():
            is_halved = name == ENDPOINTS[0] and second * batch_s >= 10
            rate.add(1000 if not is_halved else 500, batch_s)
            router.set_rate(name, rate.patches_per_s)
    counts = Counter(first(router, digest) for digest in DIGESTS)
    # A ninth is its part; 5 % above it, and five standard deviations of 22.
    assert counts[ENDPOINTS[0]] < 1.05 * 5000 * 0.64 / 4.64
