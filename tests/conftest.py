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

from tests.support.deterministic_cpu import pin_without_avx512, skip_where_refused

pin_without_avx512()  # before torch is imported

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

LONGEST = (
    "scheduler_svc/engine/test_engine_parity.py",
    "chaos/test_link.py",
    "kernels/test_emulated_attention.py",
    "e2e/test_poison.py",
    "kernels/test_attention_compiles.py",
    "e2e/test_smollm2.py",
    "docs/test_commands.py",
    "compose/test_compose.py",
    "scheduler_svc/simulator/test_simulation.py",
    "e2e/test_structured_output.py",
    "runner_svc/model/test_parity.py",
    "chaos/test_soak.py",
    "e2e/test_deterministic_service.py",
    "kernels/test_emulated_canonical_products.py",
    "roster_client/serve/test_serve.py",
    "e2e/test_exactness.py",
    "kernels/test_small_kernels_compile.py",
    "chaos/test_real_model.py",
    "scheduler_svc/policies/test_fair.py",
    "e2e/test_scheduler_restart.py",
    "scheduler_svc/engine/test_engine_exact.py",
    "e2e/test_drain.py",
    "runner_svc/gpu/test_backend.py",
    "e2e/test_runners_come_and_go.py",
    "scheduler_svc/policies/test_auto.py",
    "e2e/test_pair_table.py",
    "bench/serving/test_serving.py",
    "e2e/test_top.py",
    "roster_client/commands/test_simulate.py",
    "scheduler_svc/test_main.py",
    "examples/test_typescript.py",
    "chaos/test_chaos.py",
    "scheduler_svc/policies/test_deadline.py",
    "e2e/test_policies.py",
    "scheduler_svc/policies/test_priority.py",
    "e2e/test_refusals.py",
    "scheduler_svc/simulator/test_fast_forward.py",
    "e2e/test_openai_fleet.py",
    "scheduler_svc/engine/test_true_refusals.py",
    "e2e/test_cancelled_streams.py",
    "scheduler_svc/front/text/test_text_stream.py",
    "kernels/test_emulated_experts.py",
    "scheduler_svc/runners/test_unlike_pools.py",
    "packaging/test_setting_sources.py",
    "runner_svc/execution/test_runner_stalls.py",
    "bench/test_gpu_commands.py",
    "scheduler_svc/failure/test_recovery_walks.py",
    "bench/check/test_counting.py",
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


@pytest.fixture(autouse=True, scope="session")
def still_frozen() -> Iterator[None]:
    """Checks that no test has thawed what was frozen: every later collection would visit a million objects."""
    frozen = gc.get_freeze_count()
    yield
    assert gc.get_freeze_count() > frozen / 2, "a test has called gc.unfreeze()"


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


@pytest.fixture
def deterministic_cpu() -> None:
    """Skips the test, with the sentence of a runner's checks at its start, where they refuse to be deterministic."""
    skip_where_refused()
