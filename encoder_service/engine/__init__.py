"""The threads that encode: one job queue, three workers, CUDA streams, and the failure cache."""
