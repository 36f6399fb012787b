"""The output file: a record per line, appended as requests end, from which an interrupted run is resumed."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roster_client.batch.input_file import BrokenLine, Line
from roster_client.batch.records import ID_PREFIX, Record, is_error

_BEGINNING = b'{"id": "' + ID_PREFIX.encode()

_SEPARATORS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters at which some readers end a line; JSON escapes those below 32 itself."""


class OutputFile:
    """The file, locked and open for appending, used in a `with`; a line that a crash cut short is removed first."""

    def __init__(self, path: Path) -> None:
        """Creates the file, or reads what it has. Raises OSError, and ValueError if it is not a batch's output."""
        self.path = path
        self.failed = 0
        """Number of records that are errors."""
        self._custom_ids: set[str] = set()
        self._lines: set[int] = set()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(f"{path} is not a file on a disk, from which a run could be continued: name one")
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def has(self, line: Line | BrokenLine) -> bool:
        """Returns whether the file has the line's record: by its id, or by its number if it has none."""
        return line.number in self._lines if line.custom_id is None else line.custom_id in self._custom_ids

    def write(self, record: Record) -> None:
        """Appends a record. Raises OSError, for example without room on the disk."""
        line = json.dumps(record, ensure_ascii=False).translate(_SEPARATORS)
        data = memoryview(line.encode() + b"\n")
        while data:
            data = data[os.write(self._file, data) :]
        self._note(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is being written by another `roster batch`: wait for it to end") from None

    def _read(self) -> None:
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                record = _parsed(line)
                if record is not None:
                    self._note(record)
                    end += len(line)
                    if not line.endswith(b"\n"):
                        os.write(self._file, b"\n")
                elif line.endswith(b"\n") or not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                    raise ValueError(
                        f"{self.path} has other content: line {number} is not of a batch's output; name another file"
                    )
                else:
                    os.ftruncate(self._file, end)

    def _note(self, record: Record) -> None:
        self.failed += is_error(record)
        if record["custom_id"] is not None:
            self._custom_ids.add(record["custom_id"])
        else:
            self._lines.add(record["error"]["line"])


def _parsed(line: bytes) -> Record | None:
    """Returns the record of a line; None if it is not one."""
    try:
        record: Any = json.loads(line)
        is_error(record)
        whole = isinstance(record["custom_id"], str) or isinstance(record["error"]["line"], int)
        return record if whole else None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
