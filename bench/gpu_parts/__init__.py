"""The parts of `bench.gpu`: each is a module with a `run(probe)`, and imports only what it measures."""
