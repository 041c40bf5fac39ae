"""Size checks at start: whether this machine can hold an arena, and which setting to change if not."""

import os
from pathlib import Path

GIB = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")


class StoreSizeError(ValueError):
    """The store cannot start at the requested size; the message says which setting to change."""


def check_host(folder: Path, size_bytes: int) -> None:
    """Raise `StoreSizeError` if `folder` or this process's memory limit has no space for `size_bytes` more."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreSizeError(f"--store-segment-dir {folder} does not exist or cannot be written to")
    files = os.statvfs(folder)
    free_bytes = files.f_bavail * files.f_frsize
    if size_bytes > free_bytes:
        raise StoreSizeError(_too_small(folder, size_bytes, free_bytes, files.f_blocks * files.f_frsize))
    memory_bytes = _unused_memory_bytes()
    if size_bytes > memory_bytes:
        raise StoreSizeError(
            f"a host store of {_gib(size_bytes)} does not fit the {_gib(memory_bytes)} of memory that this "
            "process may still take (shared memory counts against the container's memory limit): lower "
            "--store-host-gib or raise the limit"
        )


def device_error(device: str, size_bytes: int, reason: str) -> StoreSizeError:
    """Return the error for a device that cannot hold its arena."""
    return StoreSizeError(
        f"a device store of {_gib(size_bytes)} does not fit {device}: lower --store-device-gib "
        f"(0 turns it off). The device says: {reason}"
    )


def _too_small(folder: Path, size_bytes: int, free_bytes: int, total_bytes: int) -> str:
    return (
        f"a host store of {_gib(size_bytes)} does not fit {folder}, which has {_gib(free_bytes)} free of "
        f"{_gib(total_bytes)}: lower --store-host-gib, or enlarge {folder} (Docker and Compose: shm_size; "
        "Kubernetes: an emptyDir with medium Memory mounted there)"
    )


def _unused_memory_bytes() -> int:
    """Return the memory available on the machine or below the control group's limit, whichever is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    unused = int(meminfo["MemAvailable"].split()[0]) * 1024
    for limit, usage in (
        ("memory.max", "memory.stat"),  # cgroup v2, as seen from inside a container
        ("memory/memory.limit_in_bytes", "memory/memory.stat"),  # v1
    ):
        try:
            allowed = (_CGROUP / limit).read_text().strip()
            used = _unreclaimable_bytes((_CGROUP / usage).read_text())
        except OSError:
            continue
        if allowed != "max":
            unused = min(unused, int(allowed) - used)
    return max(unused, 0)


def _unreclaimable_bytes(memory_stat: str) -> int:
    """Return anonymous and shared memory of a control group; its page cache is reclaimable and does not count."""
    fields = dict(line.split() for line in memory_stat.splitlines())
    if "anon" in fields:
        return int(fields["anon"]) + int(fields["shmem"])
    return int(fields.get("total_rss", 0)) + int(fields.get("total_shmem", 0))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
