"""`roster-scheduler`: starts the process of the first front worker, then the service (see `service`)."""

from __future__ import annotations

import sys

from roster_common.std_streams import forgive_output
from scheduler_svc.front.worker_process import spawn_worker


def main() -> None:
    """Runs the `roster-scheduler` command."""
    forgive_output()
    first_worker = spawn_worker()
    from scheduler_svc.operation.service import run  # imported while the worker process imports its own modules

    sys.exit(run(first_worker))


if __name__ == "__main__":
    main()
