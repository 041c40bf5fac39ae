"""Parts of `bench.edge`: a tower and a decoder that cost nothing."""
