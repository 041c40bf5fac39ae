"""Seeded loads, the demo, and the tables they print."""
