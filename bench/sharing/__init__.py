"""Parts of the benchmark of a store that engines share."""
