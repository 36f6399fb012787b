"""Whether the deterministic mode has been tried on CPUs like this machine's; its check at start may refuse others."""

from __future__ import annotations

from pathlib import Path

import pytest


def _is_tried() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False


TRIED_CPU = _is_tried()
"""MKL need not honour the variables that pin it on CPUs of other makers."""
NEEDS_TRIED_CPU = pytest.mark.skipif(not TRIED_CPU, reason="the deterministic mode has been tried on Intel CPUs only")
