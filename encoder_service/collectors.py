"""The state of the components, read as metrics at each scrape."""

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from encoder_contract.certificates import Certificates, expirations
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.cluster.cluster import ClusterStatus, IndexState
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.device_reports import ModelFacts
from encoder_service.image.decoder import FileDecoder
from encoder_service.image.sources import SourceCache
from encoder_service.logs import dropped_lines
from encoder_service.metrics import DEMAND, Reading, counter, gauge
from encoder_service.scheduler import QueueLimits, Snapshot, State
from encoder_service.store import StoreStats, TierStats


def identity_readings(
    description: pb.DescribeResponse, facts: ModelFacts, devices: str, peak_flops: float
) -> Iterator[Reading]:
    """Yield versions, model, and the peak speed of the devices if it is configured."""
    versions = (description.version, platform.python_version(), facts.torch)
    yield gauge(
        "build_info",
        "Always 1. The labels give the versions.",
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
        "attention": facts.attention,
        "decoder": facts.decoder,
    }
    yield gauge(
        "model_info", "Always 1. The labels describe the served model.", {tuple(served.values()): 1}, *served
    )
    if peak_flops:
        yield gauge(
            "device_peak_flops",
            "Peak floating-point operations per second of all devices, as configured.",
            peak_flops,
        )


def process_readings(draining: bool) -> Iterator[Reading]:
    """Yield the state of the process as a whole."""
    yield gauge("draining", "1 while the server drains and refuses new calls.", draining)
    yield counter("log_dropped", "Log lines dropped because they were not read in time.", dropped_lines())


def certificate_readings(certificates: Certificates | None, peers: Certificates | None) -> Iterator[Reading]:
    """Yield when the certificates of the server, and the authorities of clients and of other replicas, expire."""
    if certificates is None:
        return
    # A chain is as good as its first to expire. A file of authorities has an old one beside a new one for a while.
    expire = {"server": min(expirations(certificates.pem.cert))}
    for name, held in (("client_ca", certificates), ("peer_ca", peers)):
        if held is not None and held.pem.ca:
            expire[name] = max(expirations(held.pem.ca))
    yield gauge(
        "certificate_expiration_timestamp_seconds",
        "When the server's certificate and the authorities of clients and replicas expire, seconds since 1970.",
        expire,
        "certificate",
    )


def device_readings(devices: Sequence[DeviceProcess]) -> Iterator[Reading]:
    """Yield the state of each device's process."""
    labels = ("number", "device")
    processes = {(str(device.number), device.name): device for device in devices}
    up = {key: float(device.is_up) for key, device in processes.items()}
    restarts = {
        (*key, reason): count
        for key, device in processes.items()
        for reason, count in device.restarts.items()
    }
    memory = {key: device.state.memory for key, device in processes.items() if device.state is not None}
    yield gauge("device_up", "1 while the device's process runs.", up, *labels)
    yield counter(
        "device_restarts",
        "Restarts of the device's process, by the reason why the previous process ended.",
        restarts,
        *labels,
        "reason",
    )
    yield gauge(
        "device_memory_bytes",
        "Memory of the device: total, free, reserved by torch, allocated by torch. 0 on the CPU.",
        {(*key, kind): size for key, state in memory.items() for kind, size in asdict(state).items()},
        *labels,
        "state",
    )


def model_readings(files: FileDecoder, devices: Sequence[DeviceProcess]) -> Iterator[Reading]:
    """Yield the state of the decoders and the tower: those of the server's own decoder, and what devices reported."""
    counts = sum((device.counts for device in devices), Counter[str]())
    yield counter(
        "decoder_restarts",
        "Decoder processes that ended and were replaced, by the reason for their end.",
        {reason: deaths + counts[reason] for reason, deaths in files.deaths.items()},
        "reason",
    )
    yield counter(
        "decoder_messages",
        "Lines that decoder processes wrote to standard error. The server drops them.",
        files.messages + counts["messages"],
    )
    yield counter(
        "batches",
        "Batches that the tower ran, with a CUDA graph or eagerly.",
        {"graph": counts["graph_batches"], "eager": counts["eager_batches"]},
        "how",
    )
    yield counter(
        "padding_patches",
        "Padding patches that the tower computed to fill the shape of a CUDA graph.",
        counts["padding_patches"],
    )


def queue_readings(snapshot: Snapshot, limits: QueueLimits) -> Iterator[Reading]:
    """Yield the queue and its limits. Every state and class has a series, so that an empty one reads 0."""
    places = {
        (state.value, label): (state, demanded)
        for state in State
        if state is not State.GONE
        for demanded, label in DEMAND.items()
    }
    images = {labels: snapshot.images.get(place, 0) for labels, place in places.items()}
    patches = {labels: snapshot.patches.get(place, 0) for labels, place in places.items()}
    yield gauge("queue_images", "Images admitted and not finished.", images, "state", "class")
    yield gauge("queue_patches", "Patches of the images in the queue.", patches, "state", "class")
    rate = snapshot.patches_per_s
    backlogs: Counter[str] = Counter(dict.fromkeys(DEMAND.values(), 0))
    for (_, label), count in patches.items():
        backlogs[label] += count
    yield gauge(
        "backlog_seconds",
        "Time that the queue takes at the measured rate, seconds; 0 until a batch was measured.",
        {label: count / rate if rate else 0.0 for label, count in backlogs.items()},
        "class",
    )
    yield gauge(
        "patches_per_second",
        "Measured rate of encoding, over all devices; 0 until a batch was measured.",
        rate,
    )
    yield gauge("queue_source_bytes", "Bytes of the image files in the queue.", snapshot.source_bytes)
    yield gauge("queue_requests", "Requests with an image in the queue.", snapshot.requests)
    yield gauge("queue_claims", "Claims of callers on images in the queue.", snapshot.claims)
    yield gauge(
        "queue_clients", "Tenants, or without tenants hosts, with an image in the queue.", snapshot.clients
    )
    yield gauge("queue_max_images", "Most images that the queue accepts.", limits.images)
    yield gauge("queue_max_patches", "Most patches that the queue accepts.", limits.patches)
    yield gauge(
        "queue_max_source_bytes", "Most bytes of image files that the queue accepts.", limits.source_bytes
    )


def store_readings(stats: StoreStats) -> Iterator[Reading]:
    """Yield tiers, misses, pins, moves and waits."""
    yield from _tier_readings(stats.tiers)
    yield counter(
        "store_misses", "Images named in Submit and Fetch calls whose embedding was in no tier.", stats.misses
    )
    yield gauge("store_pins", "Pins on embeddings.", stats.pins)
    yield counter(
        "store_damaged_files", "Torn and damaged files of the disk tier, removed.", stats.damaged_files
    )
    yield gauge(
        "store_disk_off",
        "1 if the disk tier is off: its disk is full or fails.",
        int(stats.is_disk_off),
    )
    moves = {"down": stats.demotions, "up": stats.promotions}
    yield counter("store_moves", "Embeddings moved between the tiers.", moves, "direction")
    yield counter(
        "store_waits",
        "Writes that found no free pages, or another write of the address, and tried again.",
        stats.waits,
    )
    yield counter(
        "store_refusals", "Writes refused because the store stayed full of embeddings in use.", stats.refusals
    )


def _tier_readings(tiers: Sequence[TierStats]) -> Iterator[Reading]:
    def by_tier(value: Callable[[TierStats], float]) -> dict[str, float]:
        return {tier.name: value(tier) for tier in tiers}

    yield gauge(
        "store_used_bytes",
        "Bytes of the tier's pages that hold embeddings.",
        by_tier(lambda tier: tier.used_bytes),
        "tier",
    )
    yield gauge("store_size_bytes", "Size of the tier, bytes.", by_tier(lambda tier: tier.size_bytes), "tier")
    yield gauge(
        "store_pinned_bytes",
        "Bytes of pinned embeddings: those that are being read.",
        by_tier(lambda tier: tier.pinned_bytes),
        "tier",
    )
    yield gauge(
        "store_largest_free_bytes",
        "Bytes of the longest run of free pages.",
        by_tier(lambda tier: tier.largest_free_bytes),
        "tier",
    )
    yield gauge("store_entries", "Embeddings in the tier.", by_tier(lambda tier: tier.entries), "tier")
    yield counter(
        "store_hits",
        "Lookups that found the embedding, by the tier that had it.",
        by_tier(lambda tier: tier.hits),
        "tier",
    )
    yield counter("store_evictions", "Embeddings evicted.", by_tier(lambda tier: tier.evictions), "tier")
    yield counter("store_writes", "Embeddings written.", by_tier(lambda tier: tier.writes), "tier")


def memory_readings(
    segment: Path, sources: SourceCache, videos: SourceCache, upload_bytes: int
) -> Iterator[Reading]:
    """Yield the cached files, uploads, and the free space of the segment's file system."""
    try:
        free = os.statvfs(segment.parent)
    except FileNotFoundError:
        pass  # the folder was removed: an alert fires on the missing series
    else:
        yield gauge(
            "segment_free_bytes",
            "Free bytes of the file system that holds the store's shared memory.",
            free.f_bavail * free.f_frsize,
        )
    yield gauge(
        "sources_bytes", "Bytes of image files cached to encode evicted embeddings again.", sources.held_bytes
    )
    yield gauge("sources_size_bytes", "Size of the cache of image files, bytes.", sources.max_bytes)
    yield gauge("sources_images", "Cached image files.", len(sources))
    yield gauge("videos_bytes", "Bytes of video files cached to decode frames from.", videos.held_bytes)
    yield gauge("videos_size_bytes", "Size of the cache of video files, bytes.", videos.max_bytes)
    yield gauge("videos", "Cached video files.", len(videos))
    yield gauge("upload_bytes", "Bytes reserved for uploads in progress.", upload_bytes)


def cluster_readings(status: ClusterStatus) -> Iterator[Reading]:
    """Yield the state of the index connection, and the peers."""
    states = {each.value: float(each is status.state) for each in IndexState}
    yield gauge("index_state", "1 for the state of the index connection, 0 for the others.", states, "state")
    yield gauge("index_peers", "Other live replicas that this replica sees.", status.peers)
    yield gauge(
        "index_never_joined",
        "1 if an index is configured and this replica has not joined it since its start.",
        float(bool(status.never_joined)),
    )
    yield counter(
        "foreign_rows",
        "Rows from peers ignored because they were not signed with the fleet's key.",
        status.foreign_rows,
    )
