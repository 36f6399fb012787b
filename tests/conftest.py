"""Settings for all tests: only pytest's timeout bounds property tests, and the longest files run first.

CI machines are shared, and an example that takes 10 ms alone takes 300 ms beside a compiler.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

LONGEST = (
    "scheduler_svc/engine/test_engine_parity.py",
    "kernels/test_emulated_attention.py",
    "chaos/test_chaos.py",
    "chaos/test_link.py",
    "e2e/test_poison.py",
    "kernels/test_attention_compiles.py",
    "e2e/test_smollm2.py",
    "docs/test_commands.py",
    "kernels/test_small_kernels_compile.py",
    "e2e/test_cancelled_streams.py",
    "chaos/test_soak.py",
    "e2e/test_drain.py",
    "scheduler_svc/failure/test_recovery_walks.py",
    "examples/test_typescript.py",
    "kernels/test_barriers.py",
    "e2e/test_runners_come_and_go.py",
    "scheduler_svc/engine/test_engine_exact.py",
    "e2e/test_scheduler_restart.py",
    "roster_client/serve/test_serve.py",
    "bench/test_gpu_commands.py",
    "e2e/test_structured_output.py",
    "e2e/test_top.py",
    "runner_svc/model/test_parity.py",
    "chaos/test_real_model.py",
    "e2e/test_exactness.py",
    "bench/serving/test_serving.py",
    "bench/check/test_counting.py",
    "scheduler_svc/test_main.py",
    "scheduler_svc/policies/test_deadline.py",
    "compose/test_compose.py",
)
"""Files that take 10 seconds or more, alternating between those that compute and those that wait."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes everything imported and collected, as the services do, so that no garbage collection scans it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first: xdist assigns files in this order, and no worker ends with a long file alone."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    if missing := [path for path in places if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py names files that do not exist: {missing}")
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Resets the logs, which a command called in this process configures for a stderr that pytest closes afterwards."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Restores the handlers of signals, which a command called in this process replaces for its whole life."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
