"""The devices: the job queue, and a process for each device, to which the event loop pushes its jobs."""

EXIT_LOST, EXIT_STUCK = 70, 71
"""Exit codes of a process whose device was lost, or hangs: a server, or one of its device processes."""
