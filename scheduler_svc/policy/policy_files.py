"""Loads policies that are not installed: a class in a file (`./mine.py`) or in an importable module (`module:Class`).

A file is read each time. The source is executed in the engine's process, so only the scheduler's own host may name
it: `policy` and `policy_dir` are settings of that host, and a call names a file of `policy_dir` only.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from scheduler_svc.policy.interface import Policy

SUFFIX = ".py"
_MODULE = "roster_policy_file_"


class UnknownPolicy(ValueError):
    """The policy is not installed or cannot be imported; the message says which, and what is installed."""


def is_file_name(name: str) -> bool:
    """Returns whether the name of a policy is that of a file, `FILE.py` or `FILE.py:CLASS`, with or without folders."""
    path, _, chosen = name.partition(SUFFIX + ":")
    return name.endswith(SUFFIX) or (bool(chosen) and bool(path))


def file_in(folder: Path, name: str) -> str:
    """Returns the full name of a file of the folder, with its class if `name` has one. Raises UnknownPolicy."""
    path, chosen = _parts(name)
    if "/" in path or "\\" in path or path.startswith("."):
        raise UnknownPolicy(
            f"{name!r} is a path: name a file of the scheduler's folder of policies, {_files_text(folder)}"
        )
    if path not in files_of(folder):
        raise UnknownPolicy(f"there is no policy {name!r} in {folder}, which has {_files_text(folder)}")
    return str(folder / path) + (f":{chosen}" if chosen else "")


def files_of(folder: Path) -> list[str]:
    """Returns the names of the policy files in the folder, sorted. Raises UnknownPolicy if it can't be read."""
    try:
        files = [path.name for path in folder.iterdir() if path.suffix == SUFFIX and path.is_file()]
    except OSError as error:
        raise UnknownPolicy(
            f"the folder of policies {folder} can't be read ({error.strerror}): create it, or correct policy_dir"
        ) from error
    return sorted(name for name in files if not name.startswith((".", "_")))


def class_in_file(name: str) -> type[Policy]:
    """Returns the policy class of `FILE.py` or `FILE.py:CLASS`. Raises UnknownPolicy.

    Its `name` is the file's name, with the class if one was named.
    """
    text, chosen = _parts(name)
    path = Path(text).absolute()
    module = _executed(path)
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__
    }
    if chosen and chosen not in classes:
        raise UnknownPolicy(f"policy file {path} has no class {chosen!r} that extends Policy; {_has(classes)}")
    if not chosen and len(classes) != 1:
        also = f": name one, {path.name}:{next(iter(classes))} for example" if classes else ""
        raise UnknownPolicy(f"policy file {path} must have one class that extends Policy; {_has(classes)}{also}")
    found = classes[chosen] if chosen else next(iter(classes.values()))
    return _named(found, path.name + (f":{chosen}" if chosen else ""))


def class_in_module(name: str) -> type[Policy]:
    """Returns the policy class of `module:Class`, whose name is the same. Raises UnknownPolicy."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise UnknownPolicy(f"policy {name!r} cannot be imported: {error!r}") from error
    return _named(checked_class(found, f"policy {name!r}"), name)


def checked_class(found: object, name: str) -> type[Policy]:
    """Returns `found`. Raises UnknownPolicy unless it is a class that extends Policy."""
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UnknownPolicy(f"{name} is not a class that extends Policy")
    return found


def _executed(path: Path) -> ModuleType:
    """Executes the file as a new module. Raises UnknownPolicy with the line at fault."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UnknownPolicy(f"policy file {path} can't be read: {error.strerror or error}") from error
    module = ModuleType(_MODULE + path.stem)
    module.__file__ = str(path)
    former = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # pydantic and dataclasses look up annotations there
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException as error:
        if former is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = former
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UnknownPolicy(f"policy file {path} is broken{_line_of(error, path)}: {_words(error)}") from error
    return module


def _line_of(error: BaseException, path: Path) -> str:
    """Returns " in line N" for the file's last line in the traceback, or "" if it is in none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    number = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
    return f" in line {number}" if number else ""


def _words(error: BaseException) -> str:
    """Returns the error as one line; a SyntaxError without its source text."""
    return f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else repr(error)


def _named(found: type[Policy], name: str) -> type[Policy]:
    """Returns the class under another name, as a subclass: `found` may be used under its own."""
    parts = {"name": name, "__doc__": found.__doc__, "__module__": found.__module__}
    return type(found.__name__, (found,), parts)


def _parts(name: str) -> tuple[str, str]:
    """Returns the path and the class ("" if none is named) of `FILE.py` or `FILE.py:CLASS`."""
    if name.endswith(SUFFIX):
        return name, ""
    path, _, chosen = name.rpartition(":")
    return path, chosen


def _has(classes: dict[str, type[Policy]]) -> str:
    return f"it has {', '.join(classes)}" if classes else "it has none"


def _files_text(folder: Path) -> str:
    return ", ".join(files_of(folder)) or "no files"
