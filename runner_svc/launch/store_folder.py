"""The folder in which the ranks of one launcher find one another; it lasts as long as the launcher holds its lock.

A process id does not say whether a folder is in use: containers may share /dev/shm and have ids of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFIX = "roster-ranks-"
_LOCK = "lock"


class StoreFolder:
    """A folder of this process's own, in memory where that is possible."""

    def __enter__(self) -> Self:
        """Makes the folder; removes those of launchers that were killed."""
        parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        for path in parent.glob(f"{_PREFIX}*"):
            _remove_abandoned(path)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self._lock = _locked(self.path / _LOCK, os.O_CREAT)
        return self

    def keep(self) -> None:
        """Makes the folder again if something has removed it, as systemd does when a user logs out (RemoveIPC)."""
        if not self.path.exists():
            self.path.mkdir(mode=0o700)  # raises if another user has made it meanwhile
            os.close(self._lock)
            self._lock = _locked(self.path / _LOCK, os.O_CREAT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(path: Path) -> None:
    """Removes a folder whose lock is free. One without a lock is being made, or another user's."""
    with suppress(OSError):
        lock = _locked(path / _LOCK)
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(path: Path, flags: int = 0) -> int:
    """Returns the descriptor of a file that this process has locked. Raises OSError if another has."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
