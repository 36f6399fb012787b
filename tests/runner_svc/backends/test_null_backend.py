"""The null backend: readable text at the configured pace."""

from __future__ import annotations

import time

from runner_svc.backends.null_backend import NullBackend
from runner_svc.execution.runner import Runner
from tests.support.plans import SAMPLE, admission, ints, plan


def test_every_sequence_spells_the_pangram() -> None:
    runner = Runner(NullBackend())
    runner.execute(1, plan(admissions=[admission(0, [1], [1]), admission(1, [1] * 5, [2])], extents=[(1, 0, 4, 0)]))
    tokens = []
    for step in range(10):
        extents = [(0, step, 1, SAMPLE), (1, 4 + step, 1, SAMPLE)]
        tokens.append(ints(runner.execute(2 + step, plan(extents=extents)).tokens))
    assert bytes(token for token, _ in tokens) == b"he quick b"
    assert bytes(token for _, token in tokens) == b"uick brown"


def test_a_step_takes_the_time_that_was_set() -> None:
    runner = Runner(NullBackend(step_ms=30))
    begin = time.monotonic()
    result = runner.execute(1, plan(admissions=[admission(0, [1], [1])], extents=[(0, 0, 1, SAMPLE)]))
    assert time.monotonic() - begin >= 0.03
    assert result.timings.forward_ns >= 30_000_000
