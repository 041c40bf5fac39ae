"""Parts of `bench.scale`: replicas forked from one process, and what the index costs Redis."""
