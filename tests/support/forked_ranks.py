"""Ranks of a group as forked processes, which share what their parent has mapped before."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from runner_svc.interface.ranks import Shard


def forked(size: int, run: Callable[[Shard], None]) -> None:
    """Runs `run` in a process for each rank at the same time. Raises AssertionError if it failed in one."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                run(Shard(rank, size))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"exit codes of the ranks: {codes}"
