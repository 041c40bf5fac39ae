"""A source: an image file as it was submitted, and its header, which is read once."""

from dataclasses import dataclass, field

from encoder_contract.header import Header


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes that are what their name says and within the limits. `key` is the `source_key` of the image's name."""

    key: bytes
    data: bytes = field(repr=False)
    header: Header
