"""Several servers: the pool, routing, retries, and failover."""
