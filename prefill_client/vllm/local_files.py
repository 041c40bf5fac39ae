"""Files of this host that requests name by `file://` URLs, under vLLM's own `--allowed-local-media-path`."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from encoder_contract.errors import ForbiddenError, InvalidRequestError


def read_local(url: str, folder: str, max_bytes: int) -> bytes:
    """Return the file of a `file://` URL in `folder`, which may have at most `max_bytes`.

    Raises `ForbiddenError` for a file elsewhere, and `InvalidRequestError` for one that cannot be read.
    """
    if not folder:
        raise ForbiddenError("file:// URLs need --allowed-local-media-path")
    parts = urlsplit(url)
    path = Path(url2pathname(parts.netloc + parts.path))
    try:
        found = path.resolve()
        if Path(folder).resolve() not in found.parents:
            raise ForbiddenError(f"{path} is not in the folder of --allowed-local-media-path")
        if not found.is_file():  # a pipe or a device could block
            raise InvalidRequestError(f"{path} is not a file")
        with found.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    if len(data) > max_bytes:
        raise InvalidRequestError(f"{path} has more than {max_bytes} bytes")
    return data
