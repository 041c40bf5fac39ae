"""Parts of `bench.store`: hits on a real server, and a bare gRPC stream for comparison."""
