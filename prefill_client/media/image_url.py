"""One http or https URL, taken apart strictly: what two parsers could read in two ways is refused."""

import ipaddress
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from encoder_contract.errors import ForbiddenError, InvalidImageError

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_CHARACTERS = 8192
# What may stand in a request line; everything else is sent percent-encoded.
_TARGET_CHARACTERS = "/?:@!$&'()*+,;=-._~%[]"


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """Scheme, host and port are normal forms; `target` is path and query as the request line has them."""

    scheme: str
    host: str  # lower-case, international names in their ASCII form, no final dot, IPv6 without brackets
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL. Raises `InvalidImageError` if it is not one, `ForbiddenError` for a user or password in it."""
        if len(text) > MAX_CHARACTERS:
            raise InvalidImageError(f"an image URL may have at most {MAX_CHARACTERS} characters")
        if any(character <= " " or character in "\\\x7f" for character in text):
            raise InvalidImageError("not a URL: it contains a space, a control character or a backslash")
        try:
            return cls._of(urlsplit(text))
        except ValueError as error:  # UnicodeError, of names that have no ASCII form, is one
            raise InvalidImageError(f"not a URL: {error}") from error

    @classmethod
    def _of(cls, parts: SplitResult) -> Self:
        if parts.scheme not in DEFAULT_PORTS:
            raise InvalidImageError("an image URL must be a data:, http: or https: URL")
        if "@" in parts.netloc:
            raise ForbiddenError("an image URL must not contain a user or password")
        port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
        if not port:
            raise InvalidImageError("not a URL: port 0 is not valid")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(
            parts.scheme, host_name(parts.hostname or ""), port, quote(target, safe=_TARGET_CHARACTERS)
        )

    def joined(self, location: str) -> "ImageUrl":
        """Return the URL that a redirect from here names. Raises as `parse` does."""
        try:
            return ImageUrl.parse(urljoin(str(self), location))
        except ValueError as error:
            raise InvalidImageError(f"redirected to an invalid URL: {error}") from error

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def host_name(text: str) -> str:
    """Return the normal form of a host. Raises `ValueError` for what is no host."""
    if ":" in text:
        return str(ipaddress.IPv6Address(text))  # a zone is refused: it names an interface of ours
    name = text.lower().encode("idna").decode().removesuffix(".")
    if not name or "%" in name:
        raise ValueError("it names no host")
    return name
