"""The plug-in with which an unmodified SGLang gets its image embeddings from the encoder service (docs/sglang.md).

SGLang's tokenizer loads the package `processors`, which submits the images of a request and waits until all are
encoded. SGLang's scheduler loads the package `models`, which fetches the rows of the images in a prefill chunk.
"""
