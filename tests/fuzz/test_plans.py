"""Random plans against the runner's decoder and checker; the coverage-guided version is bench/fuzz_plan.py.

`ROSTER_FUZZ_PLANS=1000000 pytest tests/fuzz/test_plans.py` runs longer.
"""

from __future__ import annotations

import os
import random
from collections import Counter

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from tests.support.plans import SAMPLE, admission, plan, sampling
from tests.support.random_plans import PlanFuzzer
from tests.support.thoroughness import count

PLANS = int(os.environ.get("ROSTER_FUZZ_PLANS", count(5000, in_ci=2500)))
SEED = int(os.environ.get("ROSTER_FUZZ_SEED", random.randrange(1 << 32)))


def test_random_plans_are_executed_or_refused() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()
    copied = 0
    for number in range(PLANS):
        if number % 500 == 0:
            fuzzer = PlanFuzzer(rng.randint, rng.randbytes)
        counts[fuzzer.turn()] += 1
        copied += fuzzer.has_copied
    print(dict(counts))
    assert counts["executed"] > PLANS / 4 and counts["refused"] > PLANS / 20
    assert copied > PLANS / 100


def test_more_logprobs_than_tokens_fail_the_sequence_and_not_the_runner() -> None:
    """A bug found by this test: a count of 2**31 kept the backend busy forever."""
    runner = Runner(HashBackend(num_slots=2, block_size=4, num_blocks=4, max_step_tokens=8, context_length=16))
    for field in ("logprobs", "prompt_logprobs"):
        runner.reset()
        hostile = admission(0, [1, 2], [1], sampling=sampling(**{field: 2**31 - 1}))
        result = runner.execute(
            1, plan(admissions=[hostile, admission(1, [3], [2])], extents=[(0, 0, 2, SAMPLE), (1, 0, 1, SAMPLE)])
        )
        assert list(result.statuses) == [plan_pb2.ROW_STATUS_FAILED, plan_pb2.ROW_STATUS_UNSPECIFIED]
