"""`roster-scheduler`: starts the process of the first front worker, then the service (see `service`)."""

from __future__ import annotations

import sys

from roster_common.early_interrupt import end_on_interrupt, ignore_interrupts


def main() -> None:
    """Runs the `roster-scheduler` command."""
    end_on_interrupt()
    from roster_common.early_start import without_collections
    from roster_common.extras import install, lacks
    from roster_common.std_streams import forgive_output
    from scheduler_svc.front.worker_process import spawn_worker

    forgive_output()
    if reason := lacks("scheduler"):
        sys.exit(_complain(reason))
    first_worker = spawn_worker()
    try:
        with without_collections():  # imported while the worker process imports its own modules
            from scheduler_svc.operation.service import run
    except ImportError as error:  # a library that is installed but broken
        first_worker.kill()
        first_worker.wait()
        sys.exit(_complain(install("scheduler", error)))
    try:
        sys.exit(run(first_worker))
    finally:
        ignore_interrupts()


def _complain(sentence: str) -> int:
    print(f"roster-scheduler: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
