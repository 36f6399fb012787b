"""Runs a command of the sweep as a process, and finds what it leaves running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.other_user import as_other_user

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "roster": "roster_client.main",
    "roster-scheduler": "scheduler_svc.main",
    "roster-runner": "runner_svc.main",
}
LONGEST_S = 60.0
_MARK = "ROSTER_TEST_SWEPT"
# Python runs sitecustomize in every process, so that child processes lack the modules too.
_BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r} or name in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a process said, and what it left."""

    status: int
    stdout: str
    stderr: str
    left: list[str]
    """Command lines of processes that still ran 5 s after the end."""

    @property
    def sentences(self) -> list[str]:
        """Lines of stderr that are no log."""
        return [line for line in self.stderr.splitlines() if line.strip() and not line.startswith("20")]


def run(
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    blocked: Sequence[str] = (),
    interrupt_s: float | None = None,
    stdout: str | None = None,
    other_user: bool = False,
) -> Ended:
    """Runs a command line in a folder of its own until it ends.

    `blocked`: modules that can't be imported. `interrupt_s`: time of SIGINT to the whole process group, as Ctrl-C in a
    terminal. `stdout`: a file for standard output. `other_user`: runs as a user that may read, but not write.
    """
    mark = uuid.uuid4().hex
    path = str(ROOT)
    if blocked:
        site = folder / f"site-{mark}"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_BLOCK.format(blocked=set(blocked)))
        path = f"{site}{os.pathsep}{ROOT}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROSTER_")}
    kept |= {"MPLCONFIGDIR": f"{tempfile.gettempdir()}/roster-sweep-matplotlib"}
    kept |= {"PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", _MARK: mark}
    arguments = [sys.executable, "-m", MODULES[command[0]], *command[1:]]
    process = subprocess.Popen(
        as_other_user(arguments) if other_user else arguments,
        cwd=folder,
        env=kept | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout is None else open(stdout, "w"),  # noqa: SIM115
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if interrupt_s is not None:
            time.sleep(interrupt_s)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nit did not end within {LONGEST_S:g} s"
    return Ended(process.returncode, out or "", err, _left(mark))


def _left(mark: str) -> list[str]:
    """Returns the command lines of this run's processes that live on; kills them."""
    deadline = time.monotonic() + 5
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = []
    for process in found:
        try:
            lines.append(" ".join(process.cmdline()))
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return lines


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
