"""Checks of the machine: packages, file limits, clock, folders."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from roster_client.doctor.findings import Finding, State
from roster_common.distribution import version_line
from roster_common.extras import MODULES, missing

_NEEDED = ("scheduler", "runner")
_ADDS = {
    "openai": "the OpenAI API",
    "cuda": "NVIDIA GPUs",
    "bench": "`roster bench`",
    "tracing": "traces of requests",
    "plot": "pictures",
}
FILES = 4096
"""Open files that a scheduler with a few thousand connections needs."""
_FREE_BYTES = 2 << 30
_UNSYNCHRONISED = 5  # adjtimex's TIME_ERROR
_BUILT = 1_750_000_000
"""A time that has passed: a clock before it is wrong."""


def extras() -> Iterator[Finding]:
    """Checks the packages of each extra."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("version", State.OK, f"{version_line('roster')}, Python {python}")
    for extra in (*_NEEDED, *_ADDS):
        absent = missing(MODULES[extra])
        install = f"pip install 'roster-serve[{extra}]'"
        if not absent:
            yield Finding(f"extra {extra}", State.OK, "installed")
        elif extra in _NEEDED:
            text = f"missing {', '.join(absent)}: this machine can't run `roster-{extra}`"
            yield Finding(f"extra {extra}", State.PROBLEM, text, install)
        else:
            yield Finding(f"extra {extra}", State.NOTE, f"not installed; it adds {_ADDS[extra]}", install)


def open_files() -> Finding:
    """Checks the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return Finding("open files", State.OK, f"at most {soft:,}")
    largest = FILES * 4 if hard == resource.RLIM_INFINITY else min(hard, FILES * 4)
    return Finding(
        "open files", State.WARNING, f"at most {soft:,}, which many connections reach", f"ulimit -n {largest}"
    )


def clock() -> Finding:
    """Checks that the clock is synchronised: deadlines, certificates and logs of several machines depend on it."""
    if time.time() < _BUILT:
        return Finding("clock", State.PROBLEM, f"it says {time.ctime()}, which has passed", "set the clock")
    if _time_state() == _UNSYNCHRONISED:
        todo = "timedatectl set-ntp true, if several machines work together"
        return Finding("clock", State.NOTE, "the kernel's clock is not synchronised", todo)
    return Finding("clock", State.OK, time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _time_state() -> int:
    """Returns the state of adjtimex, which sets nothing here; 0 where there is none."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return 0


def folder(subject: str, path: Path) -> Finding:
    """Checks that a folder, or the one that it will be made in, can be written and has space."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        todo = "set cache_dir (ROSTER_CACHE_DIR) to a folder that can be written" if subject == "cache" else ""
        return Finding(subject, State.PROBLEM, f"{path} can't be written ({error.strerror})", todo)
    free = shutil.disk_usage(there).free
    if free < _FREE_BYTES:
        return Finding(subject, State.WARNING, f"{path} has {free / 2**30:.1f} GiB left", "free space, or move it")
    return Finding(subject, State.OK, f"{path}, {free / 2**30:,.0f} GiB free")


def cores() -> Finding:
    """Reports the cores that this process may use."""
    count = len(os.sched_getaffinity(0))
    state = State.OK if count > 1 else State.WARNING
    return Finding("cores", state, f"{count}", "" if count > 1 else "give the services two cores or more")
