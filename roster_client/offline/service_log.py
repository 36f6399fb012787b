"""The file in which the output of services goes that run behind a script, a notebook or `roster batch`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self


class ServiceLog:
    """Writes the services' lines to a file, used in a `with`.

    A file that the user did not name is removed at the end, unless an error is to refer to it (`keep`).
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, which is overwritten; None: a new one in the folder for temporary files. Raises OSError."""
        if path is None:
            descriptor, name = tempfile.mkstemp(prefix="roster-", suffix=".log")
            self._file = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
            self.path = Path(name)
        else:
            self._file = path.open("w", encoding="utf-8", errors="replace")
            self.path = path
        self.keep = path is not None

    def line(self, name: str, text: str) -> None:
        """Writes one line of a service."""
        if not self._file.closed:
            self._file.write(f"{name:>9} | {text}\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        if not self.keep:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
