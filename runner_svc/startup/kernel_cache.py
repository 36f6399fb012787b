"""Where CuPy keeps compiled kernels: in the cache folder, or in memory where nothing may be written there."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import structlog

FOLDER = "CUPY_CACHE_DIR"
IN_MEMORY = "CUPY_CACHE_IN_MEMORY"

log = structlog.get_logger()


@cache
def choose_kernel_cache(cache_folder: Path) -> None:
    """Sets CUPY_CACHE_DIR, unless it is set, to a folder below `cache_folder`; CuPy reads it when it is imported.

    Sets CUPY_CACHE_IN_MEMORY where the folder's disk is full or nothing may be written there. Kernels are then compiled
    at each start, which takes a minute or so.
    """
    if os.environ.get(IN_MEMORY):
        return
    folder = Path(os.environ.get(FOLDER) or cache_folder.absolute() / "kernels")
    try:
        if not folder.is_absolute():
            raise OSError("it is not an absolute path")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
        os.environ[FOLDER] = str(folder)
        tempfile.gettempdir()  # NVRTC's sources go there
    except OSError as error:
        os.environ[IN_MEMORY] = "1"
        log.warning(
            "compiled kernels can't be kept: set cache_dir or CUPY_CACHE_DIR to a folder that can be written",
            folder=str(folder),
            error=error.strerror or str(error),
        )
        _use_any_folder()


def _use_any_folder() -> None:
    """Sets CUPY_CACHE_DIR to a folder that exists, as CuPy makes the folder even where it keeps nothing."""
    try:
        os.environ[FOLDER] = tempfile.gettempdir()
    except OSError:
        os.environ.pop(FOLDER, None)
