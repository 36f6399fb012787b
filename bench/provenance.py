"""Where a benchmark's numbers come from: the command, the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from roster_client.bench.provenance import commit, processor, utc_now


def provenance(module: str, packages: Sequence[str]) -> dict[str, Any]:
    """Command (of `python -m module`), date (UTC), commit, processor, cores and package versions, ready for JSON."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": utc_now(),
        "commit": commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
