"""Counts the instructions of pieces of work with valgrind; the counts do not depend on how busy the machine is.

A process sets up each piece of work and warms it up under `cachegrind` (without its cache model), then forks twice: one
child ends at once, the other does the counted units first. Each child reports its total since the process began, so the
difference is exactly the counted work. Hash seeds and threads are fixed; two runs differ by a few parts per thousand at
most, where addresses matter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.check.work import Advance, Work

ROOT = Path(__file__).parents[2]
FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class NoCounter(RuntimeError):
    """Raised if instructions can't be counted on this machine; the message says what to install."""


def instructions_per_unit(works: str, arguments: Sequence[str] = (), root: Path = ROOT) -> dict[str, float]:
    """Runs `python -m works arguments` (a module that calls `run_counted`). Returns instructions per unit by name of
    the work.

    `root` is the clone whose code runs. Raises NoCounter without valgrind, CalledProcessError if the module fails.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise NoCounter("valgrind is not installed: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        counter = [valgrind, "--quiet", "--tool=cachegrind", "--cache-sim=no"]
        counter += [f"--cachegrind-out-file={folder}/%p", f"--log-file={folder}/%p.log"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
        environment |= FIXED | {"PYTHONPATH": str(root)}
        command = [*counter, sys.executable, "-m", works, *arguments]
        answer = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return {
            name: (_total(Path(folder, worked)) - _total(Path(folder, idle))) / int(units)
            for name, idle, worked, units in (line.split("\t") for line in answer.stdout.splitlines() if "\t" in line)
        }


def run_counted(works: Sequence[Work]) -> None:
    """Does each piece of work in the counted process, and prints its name, both children's ids and its units. Never
    returns.

    Raises RuntimeError if a child fails.
    """
    for work in works:
        advance = work.set_up()
        advance(work.warm_up)
        idle, worked = (_child(advance, units) for units in (0, work.counted))
        print(f"{work.name}\t{idle}\t{worked}\t{work.counted}", flush=True)
    os._exit(0)  # do not wait for threads and tasks that the works left running


def _child(advance: Advance, units: int) -> int:
    """Forks a process that does `units` units and ends; returns its id."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            advance(units)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise RuntimeError("a piece of work failed")
    return process


def _total(file: Path) -> int:
    """Returns the instructions of a process, from cachegrind's output."""
    found = re.search(r"^summary: (\d+)", file.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{file} contains no count")
    return int(found[1])
