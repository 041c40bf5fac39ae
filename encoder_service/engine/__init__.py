"""The engine: the job queue, the workers on threads, and where the rows that a Fetch waits for come from."""

LOST, STUCK = 70, 71
"""Exit codes of a device process whose device was lost, or hangs."""
