"""Decoding image files to pixels on the tower's device.

On a GPU, DALI decodes batches of JPEGs, and `FileDecoder` decodes the images that DALI does not take.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError
from encoder_contract.video import Frames
from encoder_service.image.dali import DALI_BYTES, DaliJpegs
from encoder_service.image.decoder import BATCH_IMAGES, FileDecoder
from encoder_service.image.pillow import Pixels
from encoder_service.image.source import Source


class Decoder:
    """Decodes images into pixels on one device. Thread-safe.

    `files` decodes any image. `jpegs`, if given, works on the same device and decodes the images for which `can_batch`
    is true. Pixels are uint8 [H, W, 3] RGB on the device, upright (EXIF applied), with transparency over white; of an
    animation, the first frame. The tensors own their memory. On CUDA the caller's current stream writes them.
    """

    def __init__(self, device: torch.device, files: FileDecoder, jpegs: DaliJpegs | None = None) -> None:
        self._device = device
        self.files = files
        self._jpegs = jpegs

    @property
    def name(self) -> str:
        """What decodes; once started, also what the kernel enforces."""
        return f"{self._jpegs.name}, {self.files.name}" if self._jpegs else self.files.name

    @property
    def deaths(self) -> Mapping[str, int]:
        """Decoder processes that died, by reason."""
        return self.files.deaths

    @property
    def messages(self) -> int:
        """Lines that decoder processes have printed to standard error; the lines are dropped."""
        return self.files.messages

    @property
    def device_bytes(self) -> int:
        """An upper bound on the device memory that the decoder's buffers take, beside the pixels."""
        return DALI_BYTES if self._jpegs else 0

    def start(self) -> None:
        """Wait until the decoder is ready."""
        if self._jpegs:
            self._jpegs.start(BATCH_IMAGES)
        self.files.start()

    def close_videos(self) -> None:
        """See `FileDecoder`."""
        self.files.close_videos()

    def close(self) -> None:
        """Stop the decoder's processes; a further use starts them again."""
        self.files.close()

    @property
    def decodes_batches(self) -> bool:
        """Whether the decoder decodes any images in batches."""
        return self._jpegs is not None

    def can_batch(self, source: Source) -> bool:
        """Whether `decode_batch` takes this image."""
        return self._jpegs is not None and source.is_whole_jpeg

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Return the pixels of each image; None for an image that is left to `decode`.

        `can_batch` is true for each of them. Raises `RuntimeError` if the device is lost.
        """
        return self._jpegs.decode(sources) if self._jpegs else [None] * len(sources)

    def decode(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error.

        Raises `RuntimeError` for what is not the image's fault: no decoder process starts, or the pixels cannot be
        copied to the device.
        """
        pixels = self.files.decode(source)
        return pixels if isinstance(pixels, EncoderError) else self.on_device(pixels)

    def decode_frames(
        self, source: Source, frames: Frames, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Return the pixels of two frames of a video, uint8 [2, H, W, 3], on the host, or their error.

        See `FileDecoder.read_frames`. Raises as `decode` does.
        """
        return self.files.read_frames(source, frames.first, frames.second, is_wanted)

    def on_device(self, pixels: Pixels) -> Tensor:
        """Copy pixels to the device; on the CPU, return a view of them."""
        return torch.from_numpy(pixels).to(self._device)
