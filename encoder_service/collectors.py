"""The state of the components, as metrics at a scrape."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.cluster.cluster import ClusterStatus, IndexState
from encoder_service.engine.devices import ENDS, DeviceProcess
from encoder_service.engine.model import Model
from encoder_service.image.sources import SourceCache
from encoder_service.logs import dropped_lines
from encoder_service.metrics import DEMAND, Reading, counter, gauge
from encoder_service.scheduler import Limits, Snapshot, State
from encoder_service.store import StoreStats, TierStats


def identity_readings(
    description: pb.DescribeResponse, model: Model, devices: str, peak_flops: float
) -> Iterator[Reading]:
    """Yield versions and model; the device's peak only if it is known."""
    versions = (description.version, platform.python_version(), str(torch.__version__))
    yield gauge(
        "build_info",
        "Always 1; the labels say which versions run.",
        {versions: 1},
        "version",
        "python",
        "torch",
    )
    served = {
        "model": description.model_name,
        "model_type": description.model_type,
        "fingerprint": description.model_fingerprint.hex()[:12],
        "dtype": description.dtype,
        "device": devices,
        "attention": model.tower.attention,
        "decoder": model.decoder.name,
    }
    yield gauge(
        "model_info", "Always 1; the labels say what is served and how.", {tuple(served.values()): 1}, *served
    )
    if peak_flops:
        yield gauge(
            "device_peak_flops",
            "Floating-point operations per second the devices can do at best.",
            peak_flops,
        )


def process_readings(draining: bool) -> Iterator[Reading]:
    """Yield the state of the process as a whole."""
    yield gauge("draining", "1 while the server drains: it refuses new calls.", draining)
    yield counter("log_dropped", "Log lines dropped because they were not read in time.", dropped_lines())


def device_readings(model: Model, devices: Sequence[DeviceProcess]) -> Iterator[Reading]:
    """Yield the state of each device; without `devices`, of that of the model."""
    labels = ("number", "device")
    named = {(str(device.number), device.name): device for device in devices}
    here = () if devices else (("0", model.device.name),)
    up = {**dict.fromkeys(here, 1.0), **{name: float(device.is_up) for name, device in named.items()}}
    restarts = {
        (*name, reason): count for name, device in named.items() for reason, count in device.restarts.items()
    }
    restarts |= {(*name, reason): 0 for name in here for reason in ENDS}
    memory = {name: device.state.memory for name, device in named.items() if device.state is not None}
    memory |= {name: model.device.memory() for name in here}
    yield gauge("device_up", "1 while the device's process works.", up, *labels)
    yield counter(
        "device_restarts",
        "Processes of the device that ended and were replaced.",
        restarts,
        *labels,
        "reason",
    )
    yield gauge(
        "device_memory_bytes",
        "Memory of the device: total, free, reserved and allocated by torch; 0 on the CPU.",
        {(*name, kind): size for name, state in memory.items() for kind, size in asdict(state).items()},
        *labels,
        "state",
    )


def model_readings(model: Model) -> Iterator[Reading]:
    """Yield the state of decoder and tower."""
    decoder, tower = model.decoder, model.tower
    yield counter(
        "decoder_restarts", "Decoder processes that ended and were replaced.", decoder.deaths, "reason"
    )
    yield counter(
        "decoder_messages",
        "Lines that decoder processes printed to standard error; they are dropped.",
        decoder.messages,
    )
    yield counter(
        "batches",
        "Batches of the tower, in a CUDA graph or eagerly.",
        {"graph": tower.graph_batches, "eager": tower.eager_batches},
        "how",
    )
    yield counter(
        "padding_patches",
        "Patches of padding, computed to fill the shape of a CUDA graph.",
        tower.padding_patches,
    )


def queue_readings(snapshot: Snapshot, limits: Limits) -> Iterator[Reading]:
    """Yield the queue and its limits; every state and class, so that an empty one reads 0."""
    places = {
        (state.value, label): (state, demanded)
        for state in State
        if state is not State.GONE
        for demanded, label in DEMAND.items()
    }
    images = {labels: snapshot.images.get(place, 0) for labels, place in places.items()}
    patches = {labels: snapshot.patches.get(place, 0) for labels, place in places.items()}
    yield gauge("queue_images", "Images between admission and outcome.", images, "state", "class")
    yield gauge("queue_patches", "Patches of those images.", patches, "state", "class")
    yield gauge("queue_source_bytes", "Bytes of the image files queued.", snapshot.source_bytes)
    yield gauge("queue_requests", "Requests with an image in the queue.", snapshot.requests)
    yield gauge("queue_claims", "Claims of callers on queued images.", snapshot.claims)
    yield gauge("queue_clients", "Clients with an image in the queue.", snapshot.clients)
    yield gauge("queue_max_images", "Most images the queue accepts.", limits.images)
    yield gauge("queue_max_patches", "Most patches the queue accepts.", limits.patches)
    yield gauge("queue_max_source_bytes", "Most image bytes the queue accepts.", limits.source_bytes)


def store_readings(stats: StoreStats) -> Iterator[Reading]:
    """Yield tiers, hits, evictions and pins."""

    def by_tier(value: Callable[[TierStats], float]) -> dict[str, float]:
        return {tier.name: value(tier) for tier in stats.tiers}

    yield gauge(
        "store_used_bytes",
        "Bytes of the tier's pages that hold embeddings.",
        by_tier(lambda tier: tier.used_bytes),
        "tier",
    )
    yield gauge("store_size_bytes", "Bytes of the tier.", by_tier(lambda tier: tier.size_bytes), "tier")
    yield gauge(
        "store_pinned_bytes",
        "Bytes of embeddings that are being read.",
        by_tier(lambda tier: tier.pinned_bytes),
        "tier",
    )
    yield gauge(
        "store_largest_free_bytes",
        "Largest run of free pages.",
        by_tier(lambda tier: tier.largest_free_bytes),
        "tier",
    )
    yield gauge("store_entries", "Embeddings held.", by_tier(lambda tier: tier.entries), "tier")
    yield counter(
        "store_hits", "Lookups that found the embedding, by tier.", by_tier(lambda tier: tier.hits), "tier"
    )
    yield counter("store_evictions", "Embeddings evicted.", by_tier(lambda tier: tier.evictions), "tier")
    yield counter("store_writes", "Embeddings written.", by_tier(lambda tier: tier.writes), "tier")
    yield counter("store_misses", "Lookups that found the embedding in no tier.", stats.misses)
    yield gauge("store_pins", "Pins on embeddings.", stats.pins)
    moves = {"down": stats.demotions, "up": stats.promotions}
    yield counter("store_moves", "Embeddings moved between tiers.", moves, "direction")
    yield counter("store_waits", "Writes that waited for a pin to be released.", stats.waits)
    yield counter("store_refusals", "Writes refused because everything stayed pinned.", stats.refusals)


def memory_readings(
    segment: Path, sources: SourceCache, videos: SourceCache, upload_bytes: int, put_leases: int
) -> Iterator[Reading]:
    """Yield what callers hold, and the free space of the segment's file system."""
    try:
        free = os.statvfs(segment.parent)
    except FileNotFoundError:
        pass  # the folder was removed: an alert fires on the missing series
    else:
        yield gauge(
            "segment_free_bytes",
            "Free bytes of the file system that holds the shared memory.",
            free.f_bavail * free.f_frsize,
        )
    yield gauge(
        "sources_bytes", "Bytes of image files kept to recompute evicted embeddings.", sources.held_bytes
    )
    yield gauge("sources_size_bytes", "Most bytes of image files kept.", sources.max_bytes)
    yield gauge("sources_images", "Image files kept.", len(sources))
    yield gauge("videos_bytes", "Bytes of videos kept to decode frames from.", videos.held_bytes)
    yield gauge("videos_size_bytes", "Most bytes of videos kept.", videos.max_bytes)
    yield gauge("videos", "Videos kept.", len(videos))
    yield gauge("upload_bytes", "Bytes reserved for uploads.", upload_bytes)
    yield gauge("put_leases", "Images that callers are computing and may put.", put_leases)


def cluster_readings(status: ClusterStatus) -> Iterator[Reading]:
    """Yield the state of the index connection, the peers, and the image files shared."""
    states = {each.value: float(each is status.state) for each in IndexState}
    yield gauge("index_state", "1 for the state of the index connection, 0 for the others.", states, "state")
    yield gauge("index_peers", "Other live replicas that this replica sees.", status.peers)
    yield counter(
        "sources_offered",
        "Image files shared with peers, or dropped instead.",
        {"shared": status.sources_shared, "dropped": status.sources_dropped},
        "outcome",
    )
    yield counter(
        "foreign",
        "Rows and image files not signed with the fleet's key, and so not used.",
        {"rows": status.foreign_rows, "source": status.foreign_sources},
        "what",
    )
