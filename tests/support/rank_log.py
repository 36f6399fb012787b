"""The ranks of a runner as its log shows them: which process each one is, when it loaded, and when the group formed."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FIELD = re.compile(r"(\w+)=('[^']*'|\S+)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the log."""

    at_s: float
    """Seconds since 1970."""
    event: str
    fields: dict[str, str]


class RankLog:
    """Reads the log of a runner that a launcher supervises, each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._lines: dict[str, list[Line]] = {}
        self._lock = threading.Lock()

    def lines(self, event: str) -> list[Line]:
        """Returns the lines of an event, in order."""
        with self._lock:
            self._take()
            return list(self._lines.get(event, ()))

    def _take(self) -> None:
        """Reads what was written since."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for text in _COLOURS.sub("", whole.decode(errors="replace")).splitlines():
            when, _, rest = text.partition(" ")
            told = re.match(r"\[\w+\s*\] (.*?)\s*(?:\s\w+=|$)", rest.strip())
            if told is None:
                continue
            at_s = datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
            fields = {name: value.strip("'") for name, value in _FIELD.findall(rest)}
            self._lines.setdefault(told[1], []).append(Line(at_s, told[1], fields))

    @property
    def epoch(self) -> int:
        """The last epoch for which the group has formed; 0 before the first."""
        return max((int(line.fields["epoch"]) for line in self.lines("ready")), default=0)

    def await_epoch(self, epoch: int, within_s: float) -> None:
        """Waits until the group has formed for `epoch` or a later one."""
        deadline = time.monotonic() + within_s
        while self.epoch < epoch:
            assert time.monotonic() < deadline, self._path.read_text(errors="replace")[-4000:]
            time.sleep(0.02)

    def pids(self) -> dict[int, int]:
        """Returns the process of each rank."""
        return {int(line.fields["rank"]): int(line.fields["pid"]) for line in self.lines("started a rank")}
