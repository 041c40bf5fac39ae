"""Parts of `bench.fleet`: the index alone, real replicas, and more of them than this machine has."""
