"""One call of `python -m bench.gpu_comparison --peer vllm`: measures, then prints the tables of all records."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

import uvloop

from bench.gpu_comparison.peers.call import Call, measure_all, print_plan
from bench.gpu_comparison.peers.options import parse_options
from bench.gpu_comparison.peers.records import read_records
from bench.gpu_comparison.peers.site import Unusable
from bench.gpu_comparison.peers.tables import markdown


def compare(arguments: Sequence[str] | None = None) -> int:
    """Runs one call and returns the exit status: 1 if a part failed, 2 if nothing can be measured this way."""
    options = parse_options(arguments)
    try:
        call = Call.of(options)
        if options.dry_run:
            print_plan(call)
            return 0
        failed = uvloop.run(_until_told(call))
    except (Unusable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        count = len(read_records(call.path)) if call.path.exists() else 0
        print(f"interrupted: {call.path} has {count} records, and the same command continues", file=sys.stderr)
        return 130
    if call.path.exists():
        print(f"\n{markdown(read_records(call.path))}")
    return 1 if failed else 0


async def _until_told(call: Call) -> int:
    """Measures; SIGTERM ends it like Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measure_all(call)
