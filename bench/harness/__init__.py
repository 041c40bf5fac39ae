"""Runs benchmarks, keeps their results, and writes the tables."""
