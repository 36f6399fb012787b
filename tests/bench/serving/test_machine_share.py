"""Share of the processors used by others: own work does not count, others' does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.serving import machine_share
from bench.serving.machine_share import QUIET, OthersShare

SPIN = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass"


def test_own_work_and_that_of_children_is_not_others() -> None:
    """Assumes a machine whose only busy processes are this tree's."""
    own_before = machine_share._times()[2]
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    program = f"{SPIN}\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        assert machine_share._times()[2] - own_before >= 0.4, "one that has ended and one that lives"
    finally:
        child.kill()
        child.wait()


def test_the_share_is_what_neither_idled_nor_was_own(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[tuple[float, float, float]] = iter([(100.0, 50.0, 20.0), (120.0, 65.0, 25.0)])
    monkeypatch.setattr(machine_share, "_times", lambda: next(times))
    with OthersShare() as others:
        pass
    assert others.share == pytest.approx((15 - 5) / 20) and "50%" in others.note


def test_a_quiet_machine_is_not_mentioned() -> None:
    assert OthersShare(share=QUIET).note == ""
