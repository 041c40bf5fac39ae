"""Digests of URLs: servers are asked by them, and so never learn the secrets that a URL may hold."""

from encoder_contract.digest import content_digest
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_url import ImageUrl


def digest_of(url: ImageUrl) -> bytes:
    """Return BLAKE3-256 over a URL."""
    return content_digest(f"image url v1\0{url}".encode())


def shared_digest(url: ImageUrl, destinations: Destinations) -> bytes:
    """Return BLAKE3-256 over a URL and the rules by which it may be loaded.

    Whoever has other rules asks by another digest: what one may load from its network, another need not be told.
    """
    return content_digest(b"shared image url v1\0" + digest_of(url) + destinations.fingerprint)
