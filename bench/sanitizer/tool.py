"""Runs compute-sanitizer and parses its output."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Event

FAULT = "wrong_on_purpose"
"""Name of the kernel in `bench.sanitizer.fault`."""
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_TENSOR_COPIES = "--check-tensor-ops"
"""Option by which memcheck of 2026.2 and later checks tensor copies (TMA)."""
_FIRST_PORT, _PORTS = 49152, 200
_SUM = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PASSED = re.compile(r"(\d+) passed")
_SKIPPED = re.compile(r"(\d+) skipped")
_POLL_S = 0.2
_SHOWN = 4000
"""Characters shown of the output of a run that is not clean."""


@dataclass(frozen=True, slots=True)
class Run:
    """One command under a tool."""

    status: int
    """Exit status; -9 if the time limit ended the run."""
    output: str
    """Output of the command and the tool."""

    @property
    def sums(self) -> list[int]:
        """Errors of memcheck or hazards of racecheck for each process with a summary."""
        return [int(errors or hazards) for errors, hazards in _SUM.findall(self.output)]

    @property
    def tests_passed(self) -> int:
        return sum(int(count) for count in _PASSED.findall(self.output))

    @property
    def tests_skipped(self) -> int:
        return sum(int(count) for count in _SKIPPED.findall(self.output))

    @property
    def clean(self) -> bool:
        """Whether tests have run and passed under the tool, and the tool found nothing."""
        return not self.status and bool(self.sums) and not sum(self.sums) and self.tests_passed > 0

    def show(self) -> None:
        """Prints the first reports and the end of the tests' output."""
        print(self.output[:_SHOWN], *(["...", self.output[-_SHOWN:]] if len(self.output) > _SHOWN else []), sep="\n")


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """Installed compute-sanitizer and its options."""

    path: str
    limit_s: float | None = None
    """Time limit of one run in seconds; a run that takes longer is killed."""
    stopped: Event = field(default_factory=Event)
    """When set, all current runs are killed."""

    @property
    def version(self) -> str:
        """Version that the tool prints."""
        said = _said(self.path, "--version")
        return next((line for line in said.splitlines() if line.startswith("Version")), said.strip())

    def options(self, tool: str, kernels: Sequence[str], place: int) -> list[str]:
        """Returns the tool's arguments before the command; `place` differs between concurrent runs."""
        options = ["--tool", tool, "--target-processes", "all", "--port", str(_FIRST_PORT + _PORTS * place)]
        if tool == "memcheck" and _TENSOR_COPIES in _said(self.path, "--help"):
            options += [_TENSOR_COPIES, "yes"]
        return options + [word for name in kernels for word in ("--kernel-name", f"kne={name}")]

    def run(
        self, tool: str, kernels: Sequence[str], command: Sequence[str], place: int = 0, cached_memory: bool = False
    ) -> Run:
        """Runs `command` under the tool."""
        environment = {name: value for name, value in os.environ.items() if name != _NO_CACHE}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [self.path, *self.options(tool, kernels, place), *command],
                env=environment if cached_memory else environment | {_NO_CACHE: "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = time.monotonic() + (math.inf if self.limit_s is None else self.limit_s)
            while process.poll() is None:
                if self.stopped.wait(_POLL_S) or time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return Run(process.returncode, output.read().decode("utf-8", "replace"))

    def sees_faults(self, tool: str) -> bool:
        """Returns whether the tool reports a kernel that is wrong on purpose, under a filter by name."""
        run = self.run(tool, [FAULT], [sys.executable, "-m", "bench.sanitizer.fault", tool])
        if not sum(run.sums):
            run.show()
        return sum(run.sums) > 0


@cache
def _said(path: str, option: str) -> str:
    """Returns the output of the tool for an option, cached because it does not change."""
    return subprocess.run([path, option], capture_output=True, text=True, check=False).stdout


def find_sanitizer() -> str:
    """Returns the path of compute-sanitizer. Raises FileNotFoundError if it is not installed."""
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/compute-sanitizer", "/usr/local/cuda/bin"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(
            "compute-sanitizer is not on the PATH: install the CUDA toolkit, or nvidia-cuda-sanitizer-api from pip"
        )
    return found
