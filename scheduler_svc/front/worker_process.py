"""Starts the process of a front worker before its settings are known; it reads them from stdin.

This module imports almost nothing, so that the first worker starts before the engine's process has done its imports.
The imports of each process take about a second, and a restart lasts until both are done.
"""

from __future__ import annotations

import subprocess
import sys

from roster_common.early_start import without_interrupts


def spawn_worker() -> subprocess.Popen[bytes]:
    """Starts a worker process, which waits for its `WorkerStart` and exits when its stdin is closed.

    Ctrl-C reaches it only once it ignores it.
    """
    with without_interrupts():
        return subprocess.Popen([sys.executable, "-m", "scheduler_svc.front.worker"], stdin=subprocess.PIPE)
