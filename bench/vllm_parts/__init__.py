"""Parts of the benchmark of vLLM engines."""
