"""The parts of `bench.gpu`: each a module with a `run(probe)`, which imports nothing that it does not need."""
