"""The ranks' folder: removed when its launcher was killed, and never while one lives."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from runner_svc.launch.store_folder import StoreFolder

_HOLD = """
import signal
from runner_svc.launch.store_folder import StoreFolder
with StoreFolder() as folder:
    print(folder.path, flush=True)
    signal.pause()
"""


def test_a_killed_launchers_folder_is_removed_and_a_living_ones_stays() -> None:
    with (
        StoreFolder() as own,
        subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        with StoreFolder():
            assert path.exists() and own.path.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert path.exists()
        with StoreFolder() as last:
            assert not path.exists() and own.path.exists()
    assert not own.path.exists() and not last.path.exists()


def test_a_folder_that_something_removes_is_made_again() -> None:
    with StoreFolder() as folder:
        shutil.rmtree(folder.path)
        folder.keep()
        assert folder.path.stat().st_mode & 0o777 == 0o700
        with StoreFolder():
            assert folder.path.exists()
