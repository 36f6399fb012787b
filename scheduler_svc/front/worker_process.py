"""The process of a front worker, started before anybody knows what it is to do: it hears that on stdin.

This module imports next to nothing, so that the first worker can be started before the engine's process has imported
what it needs: both take about a second for that, and a restart is over when both have.
"""

from __future__ import annotations

import subprocess
import sys


def spawn_worker() -> subprocess.Popen[bytes]:
    """Starts a worker process, which waits for its `WorkerStart`. It ends when its stdin is closed."""
    return subprocess.Popen([sys.executable, "-m", "scheduler_svc.front.worker"], stdin=subprocess.PIPE)
