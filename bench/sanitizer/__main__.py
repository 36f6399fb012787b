"""compute-sanitizer over the kernels' GPU tests: memcheck and racecheck, each group of kernels with its own tests.

    python -m bench.sanitizer [--tool racecheck] [--group products] [--jobs 8] [--budget 100] [--limit 200]
        [--output FILE.json]

The tool looks at the kernels of the group alone (`--kernel-name kne=NAME`; torch's would take hours). First a kernel
that is wrong on purpose must be reported, under a filter of the same form: a filter that fits nothing ends without an
error too. A group is clean if its tests pass, each run was summed up, and no sum has an error or a hazard. Ends with 1
otherwise, and shows what the tool has reported.

With `--budget` a run skips the tests that have not begun by then, and the verdict counts them; their order is random,
and the same each time. With `--limit` a run is ended, and proves nothing.

Several runs go on at once, each one process of pytest with ports of its own: under pytest-xdist (8 workers) the tool
let no test begin, on an H200 with 2025.3.1.

What is no proof: racecheck of that version is not known to follow tensor copies (TMA) and wgmma, and memcheck looks at
tensor copies from 2026.2 on; what those read and write is checked by the tests' poisoned memory alone. And timing
differs, so that the tests must also pass without the tool.

Torch's cache of memory is off, so that a tensor is an allocation and memcheck sees where it ends. In groups that
capture graphs it stays on, as plain cudaMalloc fails during a capture: there memcheck sees the ends of torch's blocks,
not of tensors. What such a group launches stands in a group without the cache too.

Run the tests once before, as kernels that are not compiled yet take longer under the tool.
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
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only these kernels; may be given again")
    parser.add_argument("--jobs", type=int, default=8, help="runs at once")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of one run; tests not begun then are skipped")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of one run, then it is ended")
    parser.add_argument("--output", type=Path, help="also write the verdicts there, as JSON")
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
        print(f"{tool} does not report a kernel that is wrong on purpose: what it says of others means nothing")
    verdicts: list[Verdict] = []
    for verdict in check(sanitizer, seeing, options.group or list(GROUPS), options.jobs, options.budget):
        verdicts.append(verdict)
        print("clean" if verdict.clean else "NOT CLEAN", verdict, flush=True)
        if source is not None:  # each time, as the next group may be cut short
            known = {"sanitizer": sanitizer.version, "seeing": seeing, "verdicts": [asdict(each) for each in verdicts]}
            write_results(options.output, source, known)
    sys.exit(0 if verdicts and seeing == list(tools) and all(verdict.clean for verdict in verdicts) else 1)


def origin() -> dict[str, Any]:
    """What stands with the verdicts."""
    from bench.common.gpu_timing import card  # imports CuPy

    return provenance("bench.sanitizer", ["torch", "cupy"], card())


if __name__ == "__main__":
    main()
