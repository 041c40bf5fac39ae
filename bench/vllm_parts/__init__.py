"""Parts of `bench.vllm`."""
