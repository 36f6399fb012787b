"""The default name of a runner: its host's name, with -2, -3, ... for further runners on the host.

Each name has a lock file in the cache folder, locked while the process lives. No two runners that share the folder
therefore have the same name, and a restarted runner gets its former name again.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import structlog

log = structlog.get_logger()


def default_name(cache_folder: Path) -> str:
    """Returns the first free name. If the folder is not writable, returns the host's name and logs a warning."""
    host = socket.gethostname() or "runner"
    folder = cache_folder / "runner-ids"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(name for name in _names(host) if _lock(folder / f"{name}.lock"))
    except OSError as error:
        log.warning(
            "runner names can't be locked: set --runner-id for each of several runners on this host",
            folder=str(folder),
            error=str(error),
        )
        return host


def _names(host: str) -> Iterator[str]:
    yield host
    yield from (f"{host}-{number}" for number in count(2))


def _lock(path: Path) -> bool:
    """Tries to lock the file for the life of this process; the descriptor is never closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True
