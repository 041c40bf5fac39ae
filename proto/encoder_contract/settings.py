"""Settings: each field of a frozen dataclass is a flag, an environment variable, a default and a help line."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from encoder_contract.command_line import did_you_mean
from encoder_contract.endpoint import Endpoint

# The placeholder of a value in --help, by the last word of the field's name.
_METAVARS = {
    **dict.fromkeys(("listen", "advertise", "encoder"), "HOST:PORT"),
    **dict.fromkeys(("model", "dir", "folder", "disk"), "FOLDER"),
    **dict.fromkeys(("ca", "cert", "file", "key"), "FILE"),
    **{unit: unit.upper() for unit in ("bytes", "gib", "images", "patches", "pixels", "tflops", "tokens")},
    "ms": "MILLISECONDS",
    "s": "SECONDS",
    "name": "NAME",
    "formats": "NAMES",
    "index": "URL",
    "fingerprint": "HEX",
    "hosts": "HOSTS",
    "ports": "FIRST-LAST",
    "device": "DEVICE",
    "prefix": "PREFIX",
}


class ConfigError(ValueError):
    """A flag or environment variable is unknown or has a bad value. The message says which and why."""


def knob(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002 - it is the help line
    zero: bool = False,
    most: float = inf,
) -> Any:
    """Declare a field with its help line. A number must be positive, finite and at most `most`, or with `zero` 0.

    A whole number needs `most`, which follows from what each costs: so a number with digits too many is refused at the
    start, and does not exhaust a machine under load.
    """
    assert most < inf or not isinstance(default, int), f"a whole number without `most`: {help}"
    return field(default=default, metadata={"help": help, "zero": zero, "most": most})


def group(kind: type, *, prefix: str) -> Any:
    """Declare a field of type `kind`, a dataclass of knobs. Each is a setting, whose name begins with `prefix`."""
    return field(default_factory=kind, metadata={"group": kind, "prefix": prefix})


def declared(kind: type) -> Iterator[tuple[str, "Field[Any]", Any]]:
    """Yield the name, the declaration and the type of each setting in a dataclass, also of those in groups."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        if "group" not in each.metadata:
            yield each.name, each, hints[each.name]
            continue
        for name, inner, hint in declared(each.metadata["group"]):
            yield each.metadata["prefix"] + name, inner, hint


def flag(name: str) -> str:
    """Return the flag of a field: `max_image_bytes` is `--max-image-bytes`."""
    return "--" + name.replace("_", "-")


def require_folder(name: str, path: Path) -> None:
    """Raise `ConfigError` unless the setting `name`, a model's folder, exists."""
    if not path.is_dir():
        raise ConfigError(
            f"{flag(name)} {path}: there is no such folder (download a model of the Hugging Face Hub first: hf "
            "download NAME --local-dir FOLDER)"
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a program. A subclass declares a `knob` for each, and checks the values on construction."""

    # Must differ from the name of the program's Kubernetes Service: Kubernetes injects <SERVICE>_PORT and the like.
    environment_prefix: ClassVar[str]
    # First field of each group in --help -> the heading of the group, in the order of the fields.
    headings: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def environment_name(cls, name: str) -> str:
        """Return the environment variable of a field."""
        return cls.environment_prefix + name.upper()

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each field to `parser`, without defaults, so that `read` sees which flags were given."""
        section: argparse._ActionsContainer = parser
        for name, each, hint in declared(cls):
            if name in cls.headings:
                section = parser.add_argument_group(cls.headings[name])
            kind, choices = _kind(hint)
            default = "required" if each.default is MISSING else f"default {_shown(each.default)}"
            text = f"{each.metadata['help']} ({default}{at_most(each)}; {cls.environment_name(name)})"
            switch = choices is not None and set(choices) == {"no", "yes"}
            section.add_argument(
                flag(name),
                type=kind,
                choices=choices,
                nargs="?" if switch else None,  # a switch without a value means yes
                const="yes" if switch else None,
                default=argparse.SUPPRESS,
                metavar=None if choices else metavar(name, kind),
                help=text.replace("%", "%%"),
            )

    @classmethod
    def read(cls, given: Mapping[str, Any], environment: Mapping[str, str]) -> Self:
        """Combine flags and environment variables; flags win. Raises `ConfigError` for unknown names and bad values."""
        values = {**cls._from_environment(environment), **given}
        missing = [name for name, each, _ in declared(cls) if each.default is MISSING and name not in values]
        if missing:
            raise ConfigError(f"{flag(missing[0])} (or {cls.environment_name(missing[0])}) is required")
        for each in (each for each in fields(cls) if "group" in each.metadata):
            kind, prefix = each.metadata["group"], each.metadata["prefix"]
            names = [inner.name for inner in fields(kind) if prefix + inner.name in values]
            values[each.name] = kind(**{name: values.pop(prefix + name) for name in names})
        return cls(**values)

    @classmethod
    def _from_environment(cls, environment: Mapping[str, str]) -> dict[str, Any]:
        known = {cls.environment_name(name): (name, hint) for name, _, hint in declared(cls)}
        values: dict[str, Any] = {}
        for name, text in environment.items():
            if not name.startswith(cls.environment_prefix):
                continue
            if name not in known:
                raise ConfigError(
                    f"{name} is not a setting{did_you_mean(name, known)}; --help lists all settings"
                )
            field_name, hint = known[name]
            values[field_name] = _parsed(name, text, hint)
        return values

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float):
                most, zero = each.metadata["most"], each.metadata["zero"]
                rule = "must be 0 or positive, and finite" if zero else "must be positive and finite"
                if most < inf:
                    rule = f"must be from {0 if zero else 1} to {most}"
                holds = (0 < value <= most and value < inf) or (value == 0 and zero)
                self._require(holds, each.name, rule)

    def _require_endpoint(
        self, name: str, *, tcp: bool = False, parse: Callable[[str], Endpoint] = Endpoint.parse
    ) -> None:
        try:
            found = parse(getattr(self, name))
        except ValueError as error:
            raise ConfigError(f"{flag(name)} {error}") from error
        self._require(not (tcp and found.path), name, "must be host:port")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{flag(name)} {rule}, got {getattr(self, name)}")


def at_most(declaration: "Field[Any]") -> str:
    """Return the bound of a setting, to be put behind its default; empty if it has none."""
    most = declaration.metadata["most"]
    return f", at most {most}" if most < inf else ""


def metavar(name: str, kind: type) -> str:
    """Return the placeholder in --help for a value of the field `name`."""
    return _METAVARS.get(name.rpartition("_")[2], "TEXT" if kind is str else "N")


def _shown(default: Any) -> str:
    return "empty" if default == "" else str(default)


def _parsed(name: str, text: str, hint: Any) -> Any:
    kind, choices = _kind(hint)
    try:
        value = kind(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: must be {kind.__name__}") from error
    if choices and value not in choices:
        raise ConfigError(f"{name}={text}: must be one of {', '.join(choices)}")
    return value


def _kind(hint: Any) -> tuple[type, Sequence[str] | None]:
    """Return the type that parses a field's value, and its choices, if any."""
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    assert isinstance(hint, type), hint
    return hint, None
