"""The parts of `bench.gpu`: a module with a `run(probe)` for each benchmark, which imports only what it measures."""
