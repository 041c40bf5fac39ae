"""From an image file to patches: validation, the source cache, decoding, and resizing."""
