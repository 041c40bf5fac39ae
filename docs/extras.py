"""Prints what each extra takes on disk with all that it depends on, as installed in this environment."""

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

PACKAGE = "encoder-service"


def installed(extra: str) -> dict[str, Distribution]:
    """Return the packages that the extra brings, by name; raises `PackageNotFoundError` if one is not installed."""
    found: dict[str, Distribution] = {}
    ahead = [(PACKAGE, frozenset({extra}))]
    seen = set(ahead)
    while ahead:
        name, extras = ahead.pop()
        found[name.lower()] = distribution(name)
        needs = {(each.name, frozenset(each.extras)) for each in _needs(found[name.lower()], extras)} - seen
        seen |= needs
        ahead += needs
    return found


def _needs(package: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in package.requires or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield need


def size(package: Distribution) -> int:
    """Return the bytes of its files."""
    return sum(file.size or 0 for file in package.files or ())


def main() -> None:
    """Print a line for each extra."""
    for extra in ("", *sorted(distribution(PACKAGE).metadata.get_all("Provides-Extra") or ())):
        try:
            packages = installed(extra)
        except PackageNotFoundError as absent:
            print(f"{extra or 'none':15} {absent.name} is not installed here")
        else:
            total = sum(size(each) for each in packages.values())
            print(f"{extra or 'none':15} {total / 1e6:6.0f} MB in {len(packages)} packages")


if __name__ == "__main__":
    main()
