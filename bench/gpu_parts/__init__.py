"""The parts of `bench.gpu_check`. Each part is a module with a `run(probe)` that imports only what it measures."""
