"""Whether CuPy can keep compiled kernels on the disk. Where it can't, it keeps them in memory."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import structlog

IN_MEMORY = "CUPY_CACHE_IN_MEMORY"

log = structlog.get_logger()


@cache
def choose_kernel_cache() -> None:
    """Sets CUPY_CACHE_IN_MEMORY where the user has no home folder, its disk is full, or nothing may be written there.

    Kernels are then compiled at each start, which takes a minute or so. CuPy reads the variable at each compilation.
    """
    if os.environ.get(IN_MEMORY):
        return
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        if not folder.is_absolute():
            raise OSError("the user has no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
        tempfile.gettempdir()  # NVRTC's sources go there
    except OSError as error:
        os.environ[IN_MEMORY] = "1"
        log.warning(
            "compiled kernels can't be kept: set CUPY_CACHE_DIR to a folder that can be written",
            folder=str(folder),
            error=error.strerror or str(error),
        )
