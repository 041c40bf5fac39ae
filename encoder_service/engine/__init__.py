"""The engine: the job queue, and a process for each device, whose threads encode its jobs."""

LOST, STUCK = 70, 71
"""Exit codes of a device process whose device was lost, or hangs."""
