"""Process whose instructions are counted: `python -m bench.check.works [--slowdown 0.2]`.

`--slowdown` adds that share of extra work to each unit, to show that the gate detects it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.check.counting import run_counted
from bench.check.drafting_work import DRAFTING_WORK
from bench.check.front_work import FRONT_WORK
from bench.check.scheduler_work import SCHEDULER_WORK
from bench.check.work import Advance, Work
from roster_common.logs import configure_logs

WORKS = (*SCHEDULER_WORK, *FRONT_WORK, *DRAFTING_WORK)
"""New ones come last: what a work leaves behind changes what the garbage collector does in the next ones."""


def slowed(work: Work, share: float) -> Work:
    """Returns the work with units that cost `share` more."""

    def set_up() -> Advance:
        advance = work.set_up()
        return lambda units: advance(round(units * (1 + share)))

    return replace(work, set_up=set_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slowdown", type=float, default=0.0)
    share = parser.parse_args().slowdown
    configure_logs("console", "error")
    run_counted([slowed(work, share) for work in WORKS])


if __name__ == "__main__":
    main()
