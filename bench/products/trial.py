"""Kernels with some of their text changed, to find what they wait for."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from runner_svc.cuda import module


class Change(NamedTuple):
    """A change of the one place in a header that has the old text."""

    header: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A folder of changed kernels, and what is timed of them."""

    name: str
    folder: Path
    digest: str
    """Of the changes; empty without one."""

    @classmethod
    def prepared(cls, parent: Path, name: str, changes: Sequence[Change]) -> Trial:
        """Writes the folder. Raises ValueError unless each old text is there once."""
        if not changes:
            return cls(name, module.kernel_folder(), "")
        folder = Path(shutil.copytree(module.kernel_folder(), parent / name.replace(" ", "-").replace(",", "")))
        for change in changes:
            text = (folder / change.header).read_text("utf-8")
            if text.count(change.old) != 1:
                raise ValueError(f"{change.old!r} is in {change.header} {text.count(change.old)} times")
            (folder / change.header).write_text(text.replace(change.old, change.new), "utf-8")
        return cls(name, folder, hashlib.sha256("".join(change.new for change in changes).encode()).hexdigest()[:16])

    @contextmanager
    def used(self) -> Iterator[None]:
        """Kernels are compiled from the folder."""
        if not self.digest:
            yield
            return
        with (
            patch.object(module, "kernel_folder", lambda: self.folder),
            patch.object(module, "headers_hash", lambda: self.digest),
        ):
            yield
