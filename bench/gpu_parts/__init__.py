"""The parts of `bench.gpu`. Each part is a module with a `run(probe)` that imports only what it measures."""
