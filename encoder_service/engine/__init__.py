"""The engine: the job queue, the workers on threads, and where the rows that a Fetch waits for come from."""
