"""An image that a caller of SGLang sends as a text without a scheme: base64, or the path of a file."""

from urllib.parse import quote

from encoder_contract.errors import ForbiddenError
from prefill_client.media.local_files import is_file_url

_LONGEST_PATH = 4096
_JPEG = "/9j/"  # how base64 of a JPEG begins
_PATHS = ("/", "./", "../", "~")


def is_path(source: str) -> bool:
    """Return whether a text names a file: a file URL, or a text that is not base64 but may be a path."""
    if is_file_url(source):
        return True
    if ":" in source[:16] or len(source) > _LONGEST_PATH or source.startswith(_JPEG):
        return False
    return source.startswith(_PATHS) or "." in source


def as_url(source: str, name: str, *, reads_files: bool = False) -> str:
    """Return an image as a URL; bare base64 becomes a data URL, and a path a file URL if the engine `reads_files`.

    Raises `ForbiddenError` for any other path, with the `name` of the image.
    """
    if is_path(source):
        if reads_files:
            return source if is_file_url(source) else f"file:{quote(source)}"
        raise ForbiddenError(f"{name} is a path, and no files are read: send the image itself or an http URL")
    return source if ":" in source[:16] else f"data:;base64,{source}"
