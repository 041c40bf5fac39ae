"""The state of the components, as readings at a scrape."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.cluster.cluster import ClusterStatus, IndexState
from encoder_service.image.sources import SourceCache
from encoder_service.metrics import DEMAND, Reading
from encoder_service.scheduler import Limits, Snapshot, State
from encoder_service.store.store import StoreStats


def queue_readings(snapshot: Snapshot, limits: Limits) -> Iterator[Reading]:
    """Yield the queue and its limits; every state and class, so that an empty one reads 0."""
    for state in State:
        if state is State.GONE:
            continue
        for demanded, label in DEMAND.items():
            yield Reading("queue_images", snapshot.images.get((state, demanded), 0), (state.value, label))
            yield Reading("queue_patches", snapshot.patches.get((state, demanded), 0), (state.value, label))
    yield Reading("queue_source_bytes", snapshot.source_bytes)
    yield Reading("queue_requests", snapshot.requests)
    yield Reading("queue_claims", snapshot.claims)
    yield Reading("queue_clients", snapshot.clients)
    yield Reading("queue_max_images", limits.images)
    yield Reading("queue_max_patches", limits.patches)
    yield Reading("queue_max_source_bytes", limits.source_bytes)


def store_readings(stats: StoreStats) -> Iterator[Reading]:
    """Yield tiers, hits, evictions and pins."""
    for tier in stats.tiers:
        label = (tier.name,)
        yield Reading("store_used_bytes", tier.used_bytes, label)
        yield Reading("store_size_bytes", tier.size_bytes, label)
        yield Reading("store_pinned_bytes", tier.pinned_bytes, label)
        yield Reading("store_largest_free_bytes", tier.largest_free_bytes, label)
        yield Reading("store_entries", tier.entries, label)
        yield Reading("store_hits", tier.hits, label)
        yield Reading("store_evictions", tier.evictions, label)
        yield Reading("store_writes", tier.writes, label)
    yield Reading("store_misses", stats.misses)
    yield Reading("store_pins", stats.pins)
    yield Reading("store_moves", stats.demotions, ("down",))
    yield Reading("store_moves", stats.promotions, ("up",))
    yield Reading("store_waits", stats.waits)
    yield Reading("store_refusals", stats.refusals)


def memory_readings(segment: Path, sources: SourceCache, upload_bytes: int) -> Iterator[Reading]:
    """Yield the bytes of image files, and the free space of the segment's file system."""
    try:
        free = os.statvfs(segment.parent)
    except FileNotFoundError:
        pass  # the folder was removed: an alert fires on the missing series
    else:
        yield Reading("segment_free_bytes", free.f_bavail * free.f_frsize)
    yield Reading("sources_bytes", sources.held_bytes)
    yield Reading("sources_size_bytes", sources.max_bytes)
    yield Reading("sources_images", len(sources))
    yield Reading("upload_bytes", upload_bytes)


def cluster_readings(status: ClusterStatus) -> Iterator[Reading]:
    """Yield the state of the index connection, the peers, and the image files shared."""
    for each in IndexState:
        yield Reading("index_state", each is status.state, (each.value,))
    yield Reading("index_peers", status.peers)
    yield Reading("sources_offered", status.sources_shared, ("shared",))
    yield Reading("sources_offered", status.sources_dropped, ("dropped",))
    yield Reading("foreign", status.foreign_rows, ("rows",))
    yield Reading("foreign", status.foreign_sources, ("source",))


def identity_readings(
    description: pb.DescribeResponse, *, device: str, attention: str, decoder: str, peak_flops: float
) -> Iterator[Reading]:
    """Yield versions and model; the device's peak only if it is known."""
    yield Reading("build_info", 1, (description.version, platform.python_version(), torch.__version__))
    model = (description.model_name, description.model_type, description.model_fingerprint.hex()[:12])
    yield Reading("model_info", 1, (*model, description.dtype, device, attention, decoder))
    if peak_flops:
        yield Reading("device_peak_flops", peak_flops)
