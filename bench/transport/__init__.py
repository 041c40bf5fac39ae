"""Parts of `bench.store`: hits on a real server, and the bare gRPC stream beside them."""
