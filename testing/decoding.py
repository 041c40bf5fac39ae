"""Decodes files as the server does, without a server: header, limits, then in a batch or one by one."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import RARE_FORMATS, check_limits, format_of, read_header
from encoder_service.image.decoder import PillowDecoder
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.pillow import read_rare_header
from encoder_service.image.source import Source


def pillow_decoder() -> Decoder:
    """Return a decoder that decodes in the caller's thread."""
    return Decoder(torch.device("cpu"), PillowDecoder())


def source_of(file: bytes, max_image_pixels: int = 100_000_000) -> Source:
    """Return a file with its header. Raises `InvalidImageError` if the server would refuse the header."""
    header = read_rare_header(file, RARE_FORMATS) if format_of(file) is None else read_header(file)
    if isinstance(header, EncoderError):
        raise header
    check_limits(header, len(file), max_image_bytes=sys.maxsize, max_image_pixels=max_image_pixels)
    return Source(b"", file, header)


def decode_files(
    decoder: Decoder, files: Sequence[bytes], max_image_pixels: int = 100_000_000
) -> list[Tensor | EncoderError]:
    """Return the pixels or the error of each file, in order."""
    sources = [_source_or_error(file, max_image_pixels) for file in files]
    chosen = [source for source in sources if isinstance(source, Source) and decoder.can_batch(source)]
    batched = iter(decoder.decode_batch(chosen))
    outcomes: list[Tensor | EncoderError] = []
    for source in sources:
        if isinstance(source, EncoderError):
            outcomes.append(source)
        else:
            found = next(batched) if decoder.can_batch(source) else None
            outcomes.append(decoder.decode(source) if found is None else found)
    return outcomes


def _source_or_error(file: bytes, max_image_pixels: int) -> Source | EncoderError:
    try:
        return source_of(file, max_image_pixels)
    except InvalidImageError as error:
        return error
