"""Says in one sentence that nothing can be written to the folder of converted models."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from roster_common.setting_sources import UnusableSettings

_OF_THE_FOLDER = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def writes_cache(
    write: Callable[Concatenate[Path, Path, Rest], Result],
) -> Callable[Concatenate[Path, Path, Rest], Result]:
    """Wraps a function that reads the file of its first argument and writes to the folder of its second one.

    The wrapped function raises UnusableSettings where the folder is full, can't be made, or can't be written to.
    """

    @wraps(write)
    def wrapped(source: Path, folder: Path, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        try:
            return write(source, folder, *rest, **named)
        except OSError as error:
            if error.errno not in _OF_THE_FOLDER or _is_of(source, error.filename):
                raise
            reason = error.strerror
        except Exception as error:
            if f"(os error {errno.ENOSPC})" not in str(error):  # what the safetensors library raises
                raise
            reason = "No space left on device"
        raise UnusableSettings(
            f"cache_dir is {str(folder)!r}, where the converted model can't be written ({reason}): set cache_dir to a "
            "folder with room, or free some"
        )

    return wrapped


def _is_of(source: Path, name: object) -> bool:
    """Whether a name is that of the file, or of another part of it."""
    path = Path(name) if isinstance(name, str) else None
    return path is not None and path.parent == source.parent and path.suffix == source.suffix
