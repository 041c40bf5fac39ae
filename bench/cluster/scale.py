"""A fleet larger than this machine: its throughput in the simulator, and the share of the index on paper."""

from collections.abc import Mapping

from bench.harness.benchmark import Figure
from bench.harness.tables import table
from bench.simulation.simulator import Load, Machine, Simulation
from bench.simulation.trials import SKEWED
from encoder_service.cluster.index import RedisSettings

FIGURES = (
    Figure("throughput_3_over_1", "throughput of 3 replicas / one (simulated)", target=">= 2.7"),
    Figure("throughput_10_over_1", "of 10 replicas"),
    Figure("throughput_30_over_1", "of 30 replicas"),
    Figure("paper_redis_busy", "on paper, 100 replicas × 84.7 images/s: Redis's one thread", "%", scale=100),
    Figure("paper_locations_gb", "the same: ten million locations", "GB"),
    Figure("paper_sources_gb", "the same: files of 300 kB, each kept for `--source-ttl-s`, 600 s", "GB"),
)

# 720p with Qwen3-VL-8B at 400 TFLOP/s sustained: `python -m bench.sizing`.
IMAGES_PER_S = 84.7
IMAGE_S = 1 / IMAGES_PER_S
SOURCE_BYTES = 300_000
# The fleet on paper: every replica encodes at that rate and is asked for as many images that are held already.
REPLICAS, ADDRESSES = 100, 10_000_000
QUEUED = 80  # images on their way on each: a second of work
SATURATING = 1.5  # more than the replicas can do, so that what is measured is what they can do
REQUESTS = 4000


def throughput(index_s: float) -> dict[str, float]:
    """Return images per second of fleets under more load than they can take, over those of one replica alone."""
    rates = {}
    for replicas in (1, 3, 10, 30):
        load = Load(SKEWED, load=SATURATING, image_s=IMAGE_S, replicas=replicas)
        machine = Machine(
            replicas=replicas,
            prefill_engines=REQUESTS,  # never what limits
            prefill_s=0.0,
            encode_s=lambda patches: len(patches) * IMAGE_S,
            index_s=index_s if replicas > 1 else 0.0,
        )
        rates[replicas] = Simulation(machine, load.jobs(REQUESTS, seed=0)).run().images_per_s
    rows: list[list[str | float]] = [
        [str(n), rate, rate / rates[1], rate / rates[1] / n] for n, rate in rates.items()
    ]
    table(
        f"Throughput in the simulator, {index_s * 1e3:.2g} ms of index before and after each image",
        ["replicas", "images/s", "over one", "of ideal"],
        rows,
    )
    return {f"throughput_{n}_over_1": rate / rates[1] for n, rate in rates.items() if n > 1}


def on_paper(measured: Mapping[str, float]) -> dict[str, float]:
    """Return what a large fleet asks of Redis, from the microseconds and bytes measured here."""
    encoded = REPLICAS * IMAGES_PER_S
    settings = RedisSettings(url="", namespace="")
    calls = {  # calls a second, microseconds of Redis each
        "acquire (new and repeated)": (2 * encoded, measured["index_redis_acquire_us"]),
        "publish": (encoded, measured["index_redis_publish_us"]),
        "republish": (ADDRESSES * 3 / settings.location_ttl_s, measured["index_redis_publish_us"]),
        "renew leases": (
            REPLICAS * QUEUED * 3000 / settings.lease_ttl_ms,
            measured["index_redis_acquire_us"],
        ),
        "heartbeats": (REPLICAS * 1000 / settings.heartbeat_ms, measured["index_redis_beat_us_100"]),
    }
    shares = {name: per_s * each_us / 1e6 for name, (per_s, each_us) in calls.items()}
    shown: list[list[str | float]] = [
        [name, f"{per_s:,.0f}", each_us, f"{100 * shares[name]:.1f} %"]
        for name, (per_s, each_us) in calls.items()
    ]
    table(
        f"On paper: {REPLICAS} replicas x {IMAGES_PER_S:g} images/s, {ADDRESSES:,} addresses held",
        ["call", "addresses/s", "µs of Redis", "of its thread"],
        shown,
    )
    sources_per_s = encoded * SOURCE_BYTES
    figures = {
        "paper_redis_busy": sum(shares.values()),
        "paper_locations_gb": ADDRESSES * measured["index_location_bytes"] / 1e9,
        "paper_leases_gb": REPLICAS * QUEUED * measured["index_lease_bytes"] / 1e9,
        "paper_sources_gb_per_s": sources_per_s / 1e9,
        "paper_sources_gb": sources_per_s * settings.source_ttl_s / 1e9,
    }
    table("In sum", ["figure", "value"], [[name, value] for name, value in figures.items()])
    return figures
