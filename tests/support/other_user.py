"""Runs commands as a user without name and home folder, as containers do. Needs root, else the test is skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

UID = 4242
ROOT = Path(__file__).resolve().parents[2]
_KEPT = ("PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS")


def as_other_user(command: Sequence[str]) -> list[str]:
    """Returns the command as that user, with the right to read all files: this Python may lie in a folder of root."""
    program = shutil.which("setpriv")
    if os.getuid() != 0 or program is None:
        pytest.skip("only root can run a command as another user, with setpriv")
    reads = "-all,+dac_read_search"
    capabilities = (f"--inh-caps={reads}", f"--ambient-caps={reads}", f"--bounding-set={reads}")
    return [program, f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *capabilities, *command]


def other_users_environment() -> dict[str, str]:
    """Returns an environment without HOME and USER."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {"PYTHONPATH": str(ROOT)}
