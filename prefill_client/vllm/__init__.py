"""Plug-ins through which an unmodified vLLM takes its image embeddings from the encoder service (docs/vllm.md).

`middleware` submits the images of a request and replaces them by names. `connector` fetches the rows of these names
before the scheduler needs them. `cache_manager` lets prefill run up to the first image whose rows have not arrived.
"""
