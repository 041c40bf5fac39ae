"""Checks in a library's source, without running it, that the names that we use exist."""

import ast
from collections.abc import Callable, Iterable, Iterator

Read = Callable[[str], str]
"""Returns the source of a file of the library."""

Names = tuple[str, str, str, str]
"""File, class or "", function or "", and the names that must exist: parameters of the function, else members of the
class, else names of the module."""


def missing_names(read: Read, names: Iterable[Names]) -> list[str]:
    """Return the names that a release lacks."""
    missing = []
    for path, in_class, function, wanted in names:
        tree: ast.AST = ast.parse(read(path))
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
