"""Whether a process has ended, which it may do between any two questions about it."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def gone(pid: int) -> bool:
    """Returns whether no process has this id, but for one that has ended and that its parent has not waited for."""
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def has_ended(process: psutil.Process) -> bool:
    """Returns whether a process has ended, whether or not its parent has waited for it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns those that have not ended."""
    return [process for process in processes if not has_ended(process)]


def command_line(process: psutil.Process) -> list[str]:
    """Returns the words of a process's command; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Returns a process's children; none of one that has ended."""
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []
