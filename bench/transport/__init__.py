"""Parts of `bench.store`: hits and puts on a real server, and a bare gRPC stream for comparison."""
