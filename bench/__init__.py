"""The benchmarks, one per file, and their parts in folders."""
