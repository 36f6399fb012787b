"""The default name of a runner: its host's, then with -2, -3, ... for others of the same host.

Each name is a lock file in the cache folder, held as long as the process lives. So no two runners that share the folder
have one name, and a runner that is started again has its former one.
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
    """The first name that is free. Where the folder can't be written to it is the host's, and the log says so."""
    host = socket.gethostname() or "runner"
    folder = cache_folder / "runner-ids"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(name for name in _names(host) if _lock(folder / f"{name}.lock"))
    except OSError as error:
        log.warning("two runners on this host need a --runner-id each", folder=str(folder), error=str(error))
        return host


def _names(host: str) -> Iterator[str]:
    yield host
    yield from (f"{host}-{number}" for number in count(2))


def _lock(path: Path) -> bool:
    """Whether this process holds the file from now on: the descriptor is never closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True
