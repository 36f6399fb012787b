"""Runs compute-sanitizer over the kernels' GPU tests: memcheck and racecheck, each group of kernels with its own tests.

    python -m bench.sanitizer [--tool racecheck] [--group products] [--jobs 8] [--budget 100] [--limit 200]
        [--output FILE.json]

The tool checks only the kernels of the group (`--kernel-name kne=NAME`; checking torch's would take hours). First it
must report a kernel that is wrong on purpose, under a filter of the same form, because a filter that matches nothing
also ends without an error. A group is clean if its tests pass, each run has a summary, and no summary has an error or a
hazard. Otherwise the reports are printed and the exit status is 1.

With `--budget`, a run skips the tests that have not begun by then, and the result counts them; their order is random
but the same each time. With `--limit`, a run is killed at the limit and proves nothing.

Several runs go on at once, each as one pytest process with its own ports: under pytest-xdist with 8 workers no test
began (H200, compute-sanitizer 2025.3.1).

Limits: racecheck of that version is not known to follow tensor copies (TMA) and wgmma, and memcheck checks tensor
copies only from 2026.2 on, so their reads and writes are checked only by the tests' poisoned memory. Timing differs
under the tool, so the tests must also pass without it.

Torch's memory cache is off, so that each tensor is an allocation and memcheck sees its end. It stays on in groups that
capture graphs, because plain cudaMalloc fails during a capture: there memcheck sees the ends of torch's blocks, not of
tensors. Every kernel that such a group launches is also in a group without the cache.

Run the tests once beforehand, because compiling kernels takes longer under the tool.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common.provenance import provenance, write_results
from bench.sanitizer.groups import GROUPS
from bench.sanitizer.tool import Sanitizer, find_sanitizer
from bench.sanitizer.verdict import Verdict, check

TOOLS = ("memcheck", "racecheck")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="run only this tool")
    parser.add_argument("--group", choices=GROUPS, action="append", help="check only these kernels; may be repeated")
    parser.add_argument("--jobs", type=int, default=8, help="concurrent runs")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time for one run; tests that have not begun by then are skipped",
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time for one run, after which it is killed")
    parser.add_argument("--output", type=Path, help="also write the results to this file, as JSON")
    options = parser.parse_args()
    try:
        sanitizer = Sanitizer(find_sanitizer(), options.limit)
    except FileNotFoundError as error:
        sys.exit(str(error))
    print(sanitizer.version, flush=True)
    source = origin() if options.output is not None else None
    tools = options.tool or TOOLS
    seeing = [tool for tool in tools if sanitizer.sees_faults(tool)]
    for tool in set(tools) - set(seeing):
        print(f"{tool} does not report a kernel that is wrong on purpose, so its other results mean nothing")
    verdicts: list[Verdict] = []
    for verdict in check(sanitizer, seeing, options.group or list(GROUPS), options.jobs, options.budget):
        verdicts.append(verdict)
        print("clean" if verdict.clean else "NOT CLEAN", verdict, flush=True)
        if source is not None:  # after each group, as the next one may be cut short
            known = {"sanitizer": sanitizer.version, "seeing": seeing, "verdicts": [asdict(each) for each in verdicts]}
            write_results(options.output, source, known)
    sys.exit(0 if verdicts and seeing == list(tools) and all(verdict.clean for verdict in verdicts) else 1)


def origin() -> dict[str, Any]:
    """Returns the header of the results."""
    from bench.common.gpu_timing import card  # imports CuPy

    return provenance("bench.sanitizer", ["torch", "cupy"], card())


if __name__ == "__main__":
    main()
