"""Where the index in Redis is, and its times."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """Where the index is, and how long its entries live; Redis counts every time to live."""

    url: str
    namespace: str
    call_timeout_ms: int = 100
    source_timeout_ms: int = 1000  # image bytes are megabytes
    socket_timeout_ms: int = 1000  # of connecting, and of one answer, whatever the bound of the call
    # No caller waits for a heartbeat or a probe: time enough to open connections, including TLS and a cluster's map.
    beat_timeout_ms: int = 2000
    heartbeat_ms: int = 500
    replica_ttl_ms: int = 2000  # four heartbeats
    # Renewed three times within it. A holder that dies loses its leases as soon as it is off the roll; this time is for
    # leases that nobody asks about any more. It may be long, and should: a full queue has many to renew.
    lease_ttl_ms: int = 10_000
    location_ttl_s: int = 3600  # republished three times within it
    source_ttl_s: int = 600
    max_source_bytes: int = 8 << 20

    def patient(self, factor: float) -> Self:
        """Return these settings with every bound on silence so many times as long."""
        return replace(
            self,
            call_timeout_ms=int(factor * self.call_timeout_ms),
            source_timeout_ms=int(factor * self.source_timeout_ms),
            socket_timeout_ms=int(factor * self.socket_timeout_ms),
            beat_timeout_ms=int(factor * self.beat_timeout_ms),
            replica_ttl_ms=int(factor * self.replica_ttl_ms),
            lease_ttl_ms=int(factor * self.lease_ttl_ms),
        )
