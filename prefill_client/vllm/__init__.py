"""An unmodified vLLM takes its image embeddings from the encoder service; docs/vllm.md has the three flags.

`middleware` submits the images of a request and names them; `connector` fetches what the names stand for before the
scheduler needs it; `cache_manager` lets prefill run up to the first image that is not here yet.
"""
