"""A source: an image file as it was submitted, and its header, which is read once."""

from dataclasses import dataclass, field

from encoder_contract.header import Header


@dataclass(frozen=True, slots=True)
class Source:
    """A validated file: it has its digest and is within the limits. `key` is the `source_key` of its `ImageKey`."""

    key: bytes
    data: bytes = field(repr=False)
    header: Header
