"""Pillow's readers of the supported formats, used directly, without Pillow's own limits and warnings."""

import warnings
from collections.abc import Sequence

from PIL import AvifImagePlugin, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile


class _FirstPage(TiffImageFile):
    """The first page, marked as one of several: for a single page Pillow reads other directories, at unbounded cost."""

    is_animated = True


# The readers themselves and not Image.open, which has its own pixel limit (ours was checked before) and
# parses the other images in a JPEG.
READERS: dict[str, type[ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": _FirstPage,
    "AVIF": AvifImageFile,
    "JPEG2000": Jpeg2KImageFile,
}
# Formats that Pillow may have been built without -> Pillow's name of the feature.
_FEATURES = {"WEBP": "webp", "TIFF": "libtiff", "AVIF": "avif", "JPEG2000": "jpg_2000"}
# An image is decoded in one thread, so that `--decode-threads` is the number of busy threads.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# It warns of every odd tag of every file, and Python keeps every warning for ever.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


def missing(formats: Sequence[str]) -> list[str]:
    """Return which of the formats this Pillow was built without."""
    return [name for name in formats if name in _FEATURES and not features.check(_FEATURES[name])]
