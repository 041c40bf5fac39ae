"""Runs benchmarks, stores their results, and writes the tables."""
