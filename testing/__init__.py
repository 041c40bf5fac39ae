"""What tests, benchmarks and the demo share: checkpoints, photos, servers to start, a real Redis."""
