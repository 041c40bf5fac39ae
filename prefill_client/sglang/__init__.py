"""An unmodified SGLang takes its image embeddings from the encoder service; docs/sglang.md has the three variables.

`processors` is the package that SGLang's tokenizer loads: it submits the images of a request and waits until all are
encoded. `models` is the package that its scheduler loads: the model fetches the rows of the images in a prefill chunk.
"""
