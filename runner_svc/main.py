"""`roster-runner`: loads a model, connects to the scheduler, and executes plans until SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys

from roster_common.early_interrupt import end_on_interrupt, ignore_interrupts


def main() -> None:
    """Entry point of the `roster-runner` command."""
    end_on_interrupt()
    from roster_common.early_start import without_collections
    from roster_common.extras import RUNNER_ALWAYS, install, lacks
    from roster_common.std_streams import forgive_output

    forgive_output()
    reason = lacks("runner", RUNNER_ALWAYS)
    if not reason:
        try:
            with without_collections():
                from runner_svc.service import run
        except ImportError as error:  # a library that is installed but broken
            reason = install("runner", error)
    if reason:
        print(f"roster-runner: {reason}", file=sys.stderr)
        sys.exit(2)
    try:
        run()
    finally:
        ignore_interrupts()


if __name__ == "__main__":
    main()
