"""The instruction set that torch, oneDNN and MKL use on this CPU, pinned for a process that promises bits.

Each of the three chooses its kernels by the processor when it is loaded. The variables that pin them must be set before
torch is imported, so this module must not import it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LEVELS = {
    "AVX512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_CBWR": "AVX512,STRICT",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2,STRICT",
    },
}
"""Variables by instruction set, widest first. STRICT: the bits of MKL's products don't depend on rows or threads."""
_FLAGS = {
    "AVX512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "AVX2": {"avx2", "fma"},
}
PINNED = tuple(LEVELS["AVX2"])
"""Names of the variables."""


def pin() -> str:
    """Pins the instruction set for libraries that are loaded later; returns its name, "" on a CPU without one of these.

    A variable that is set already is left. Has no effect on a process that has imported torch.
    """
    level = widest(cpu_flags())
    if level and "torch" not in sys.modules:
        for name, value in LEVELS[level].items():
            os.environ.setdefault(name, value)
    return level


def widest(flags: set[str]) -> str:
    """Returns the widest of `LEVELS` that a CPU with these flags of /proc/cpuinfo has; "" for none."""
    return next((level for level in LEVELS if _FLAGS[level] <= flags), "")


def cpu_flags() -> set[str]:
    """Returns the flags of /proc/cpuinfo, empty where there are none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
