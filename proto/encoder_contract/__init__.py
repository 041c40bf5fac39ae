"""The contract between encoder and prefill: messages, addresses of content, image geometry, errors."""
