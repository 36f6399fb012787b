"""`python -m tests.support.opened_runner`: a runner that `--deterministic` starts on a GPU too.

Users' runners refuse that until the tests that use this one have passed on a card (`DETERMINISTIC_ON_GPU`).
"""

from __future__ import annotations


def main() -> None:
    from runner_svc.main import main as runner
    from runner_svc.startup import backend_factory

    backend_factory.DETERMINISTIC_ON_GPU = True
    runner()


if __name__ == "__main__":
    main()
