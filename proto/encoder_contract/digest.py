"""The content digest: BLAKE3-256 over the bytes of an image or video file, as the client received them."""

import mmap

import blake3

DIGEST_BYTES = 32


def content_digest(file: bytes | mmap.mmap) -> bytes:
    """Return the 32-byte BLAKE3 digest that names a file.

    Releases the GIL. Hashes about 7 GB/s on one core: 40 µs for a 300 KB photo, 1 ms for 6 MB. On an event loop, hash
    large images in a worker thread.
    """
    return blake3.blake3(file).digest()
