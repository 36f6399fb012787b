"""Replaces itself with a command that gets SIGTERM when the process that started it ends, even by SIGKILL.

    python tied_process.py PARENT_PID COMMAND...

It is run as a file, without this package: it starts within milliseconds. Linux sends the signal when the thread that
started the process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Becomes the command, or ends if the parent has ended already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
