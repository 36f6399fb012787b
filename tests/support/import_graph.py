"""The import graph of the product's sources, including imports for type checkers and inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Graph = dict[str, set[str]]
"""Module names, each with the modules that it imports. A package is its `__init__.py`."""


def modules(package: str) -> dict[str, Path]:
    """Returns the files of a top-level package by dotted name, without generated ones."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if "_pb2" not in path.name:
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph(*packages: str) -> Graph:
    """Returns the imports among the files of these packages."""
    files = {name: path for package in packages for name, path in modules(package).items()}
    return {name: set(_imported(name, path, files)) - {name} for name, path in files.items()}


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield from (module for module in (full if full in files else base,) if module in files)


def circles(graph: Graph) -> list[list[str]]:
    """Returns the strongly connected components of more than one module, largest first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda component: (-len(component), component))


def folder_of(module: str, files: Mapping[str, Path]) -> str:
    """Returns the folder of a module's file, with slashes."""
    return files[module].parent.relative_to(ROOT).as_posix()
