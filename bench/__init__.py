"""The benchmarks, one a file, and what they are made of in folders."""
