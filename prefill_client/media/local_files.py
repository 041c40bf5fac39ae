"""Files of this host that requests name by `file:` URLs, in a folder that the operator allows."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from encoder_contract.errors import ForbiddenError, InvalidRequestError


def is_file_url(url: str) -> bool:
    """Return whether a URL names a file of this host."""
    return url[:5].lower() == "file:"


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """The only folder whose files are read; without a `path`, none is. `option` is the engine's name for it."""

    path: str
    option: str

    def read(self, url: str, max_bytes: int) -> bytes:
        """Return the file of a `file:` URL, which may have at most `max_bytes`. A relative path begins in the folder.

        Raises `ForbiddenError` for a file elsewhere, and `InvalidRequestError` for one that cannot be read.
        """
        if not self.path:
            raise ForbiddenError(f"file:// URLs need {self.option}")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidRequestError(f"not a file URL: {error}") from error
        path = Path(self.path, url2pathname(parts.netloc + parts.path))
        try:
            found = path.resolve()
            if Path(self.path).resolve() not in found.parents:
                raise ForbiddenError(f"{path} is not in the folder of {self.option}")
            if not found.is_file():  # a pipe or a device could block
                raise InvalidRequestError(f"{path} is not a file")
            with found.open("rb") as file:
                data = file.read(max_bytes + 1)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(f"{path} cannot be read: {error}") from error
        if len(data) > max_bytes:
            raise InvalidRequestError(f"{path} has more than {max_bytes} bytes")
        return data
