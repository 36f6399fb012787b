"""The file of one key's timings in the cache folder, shared by all runners of the folder.

A file is written under another name first and then renamed, so that a reader sees a whole file, and of two runners that
start at once the later one's stays. It has the whole key, of which its name is a digest.
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from runner_svc.timings.start_timings import StartTimings

FOLDER = "timings"

log = structlog.get_logger()


class TimingsFile:
    """Timings for a key: those that were read, to which a start adds what it measures, until `keep`."""

    def __init__(self, cache_folder: Path, key: Mapping[str, str], *, reuse: bool = True) -> None:
        """Reads the file; without `reuse` it is only written. A file that can't be used costs a warning."""
        self._key = dict(key)
        digest = hashlib.blake2b(json.dumps(self._key, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.path = cache_folder / FOLDER / f"{digest}.json"
        self.timings = self._read() if reuse else StartTimings()
        self._kept = copy.deepcopy(self.timings)
        if not reuse:
            log.info("steps are timed at this start, as set")

    def keep(self) -> None:
        """Writes the timings if something was measured. A folder that can't be written costs a warning."""
        if self.timings == self._kept:
            return
        try:
            _write(self.path, json.dumps({"key": self._key, "timings": self.timings.to_json()}, indent=1))
        except OSError as error:
            log.warning(
                "the timings can't be kept: the next start measures again; set cache_dir to a folder that can be "
                "written",
                file=str(self.path),
                error=error.strerror or str(error),
            )
            return
        self._kept = copy.deepcopy(self.timings)
        log.info("the timings are kept for the next start", file=str(self.path))

    def _read(self) -> StartTimings:
        try:
            content: Any = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("key") != self._key:
                raise ValueError("it has another key")
            timings = StartTimings.from_json(content.get("timings"))
        except FileNotFoundError:
            log.info("steps are timed: no earlier start with this card, release, model and sizes kept its timings")
            return StartTimings()
        except (OSError, ValueError, RecursionError) as error:
            log.warning("kept timings can't be read, so steps are timed again", file=str(self.path), error=str(error))
            return StartTimings()
        log.info("timings of an earlier start are used", file=str(self.path))
        return timings


def _write(path: Path, text: str) -> None:
    """Writes a file that other users' runners may read, unless the umask forbids it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
