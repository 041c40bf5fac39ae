"""Checks in a library's source, without running it, that the names and the text that we use exist."""

import ast
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Read = Callable[[str], str]
"""Returns the source of a file of the library."""

Names = tuple[str, str, str, str]
"""File, class or "", function or "", and the names that must exist: parameters of the function, else members of the
class, else names of the module."""


class Release(NamedTuple):
    """The source of a release of the library."""

    files: Sequence[str]
    """The paths of its Python files."""
    read: Read


def release_in(folder: Path) -> Release:
    """Return the release whose package is in a folder."""
    files = [str(path.relative_to(folder)) for path in folder.rglob("*.py")]
    return Release(files, lambda path: (folder / path).read_text())


def releases_of(wheels: Path, package: str) -> dict[str, Release]:
    """Return the releases of a package in a folder of wheels, by their names, as `vllm-0.33.0`."""
    return {
        "-".join(wheel.name.split("-")[:2]): _wheel(wheel, package) for wheel in sorted(wheels.glob("*.whl"))
    }


def _wheel(wheel: Path, package: str) -> Release:
    archive = zipfile.ZipFile(wheel)
    inside = (name for name in archive.namelist() if name.startswith(f"{package}/") and name.endswith(".py"))
    return Release(
        [name.removeprefix(f"{package}/") for name in inside],
        lambda path: archive.read(f"{package}/{path}").decode(),
    )


def missing_texts(release: Release, texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the texts that a release lacks: each is to be in a file whose path begins as it says."""
    missing = []
    for path, text in texts:
        places = (name for name in release.files if name.startswith(path))
        missing += [] if any(text in release.read(place) for place in places) else [f"{path}: {text}"]
    return missing


def missing_names(release: Release, names: Iterable[Names]) -> list[str]:
    """Return the names that a release lacks."""
    missing = []
    for path, in_class, function, wanted in names:
        tree: ast.AST = ast.parse(release.read(path))
        if in_class:
            tree = _child(tree, in_class)
        present = _parameters(_child(tree, function)) if function else set(_definitions(tree))
        missing += [f"{path}: {in_class}.{function} {name}" for name in wanted.split() if name not in present]
    return missing


def _definitions(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module or class defines or imports, and the attributes that its methods assign."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign):
            yield from map(ast.unparse, node.targets)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _child(tree: ast.AST, name: str) -> ast.AST:
    """Return the class or function of this name."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.iter_child_nodes(tree) if isinstance(node, kinds) and node.name == name]
    assert found, f"{name} is gone"
    return found[-1]


def _parameters(function: ast.AST) -> set[str]:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return {each.arg for each in every if each is not None}
