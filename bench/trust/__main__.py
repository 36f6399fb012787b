"""Tries each isolation guarantee and prints the measured figure and the bar that it must meet.

    python -m bench.trust [--quick] [--only NAME ...] [--json FILE]

`--quick` tries a part of everything, in less than 50 s. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common.provenance import provenance, write_results
from bench.trust import lines
from roster_common.logs import configure_logs

NAMES = sorted(module.name for module in pkgutil.iter_modules(lines.__path__))


def main() -> int:
    """Runs the requested trials one after another. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.trust", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="try a part of everything, in less than 50 s")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    configure_logs("console", "error")
    rows = [_row(name, options.quick) for name in options.only]
    if options.json is not None:
        write_results(options.json, provenance("bench.trust", ("pyzmq", "protobuf", "llguidance")), {"lines": rows})
    return 0 if all(row["met"] for row in rows) else 1


def _row(name: str, quick: bool) -> dict[str, Any]:
    begin_s = time.monotonic()
    line = importlib.import_module(f"{lines.__name__}.{name}").run(quick)
    seconds = time.monotonic() - begin_s
    verdict = "met" if line.met else "MISSED"
    print(f"{name:16} {verdict:6} {seconds:5.1f} s  {line.promise}: {line.figure} (bar: {line.bar})", flush=True)
    return {"name": name, "seconds": round(seconds, 1), **asdict(line)}


if __name__ == "__main__":
    sys.exit(main())
