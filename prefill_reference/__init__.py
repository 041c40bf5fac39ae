"""A small, complete prefill service on `transformers`: how a language-model server uses the encoder."""
