"""From a prompt to its image rows: layout, chunks, and prefetching."""
