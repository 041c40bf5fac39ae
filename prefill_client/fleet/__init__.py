"""Several servers: the connection pool, routing, retries and failover."""
