"""Forced tokens that contradict the slots are refused with the reason, and change nothing."""

from __future__ import annotations

import random

import pytest

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from tests.support.drafters import LateHash, drafting_backend
from tests.support.plans import AWAIT, SAMPLE, admission, plan

# Before each bad plan: slot 0 has 13 tokens in 4 blocks. Slot 1 has a prompt of 5, of which 2 are computed. Slot 2 has
# 4 tokens and a row with 2 drafts in flight. Slot 3 has 8 tokens and a row in flight that awaits its mask.
FAULTS: list[tuple[str, plan_pb2.Plan]] = [
    ("the extent columns have different lengths: [1, 2]", plan(extents=[(0, 12, 2, AWAIT)], forced=[[7], []])),
    ("there are 1 forced tokens, the rows have 2", plan(extents=[(0, 12, 3, AWAIT)], forced=[[7, 8]])),
    ("forced token 1: there is no token 300", plan(extents=[(0, 12, 3, AWAIT)], forced=[[7, 300]])),
    ("forced token 0: there is no token -1", plan(extents=[(0, 12, 2, AWAIT)], forced=[[-1]])),
    ("extent 0: 1 forced tokens, but no start or drafts", plan(extents=[(0, -1, 2, SAMPLE)], drafts=[1], forced=[[7]])),
    ("extent 0: flags 1 of a row with forced tokens, must be 3", plan(extents=[(0, 12, 2, SAMPLE)], forced=[[7]])),
    ("extent 0: forced tokens after position 5", plan(extents=[(2, 3, 2, AWAIT)], forced=[[7]])),
    ("extent 0: forced tokens after position 8", plan(extents=[(3, 7, 2, AWAIT)], forced=[[7]])),
    ("extent 0: start 11 is not the first uncomputed position 12", plan(extents=[(0, 11, 2, AWAIT)], forced=[[7]])),
    ("extent 0: a token sampled at 14 would replace one: 15", plan(extents=[(0, 12, 2, AWAIT)], forced=[[7, 8]])),
    ("extent 0: end 15 is beyond the 14 tokens known", plan(extents=[(0, 12, 3, AWAIT)], forced=[[7]])),
    ("extent 0: 3 forced tokens after 13 known ones are beyond", plan(extents=[(0, 12, 4, AWAIT)], forced=[[7, 8, 9]])),
    (
        "a sequence is admitted with forced tokens",
        plan(releases=[1], admissions=[admission(1, [1, 2], [5])], extents=[(1, 0, 3, AWAIT)], forced=[[7]]),
    ),
]


def make_runner() -> tuple[Runner, LaunchedPlan]:
    """Returns the runner in this state, and the plan whose result is not taken."""
    sizes = {"num_slots": 4, "block_size": 4, "num_blocks": 20, "max_step_tokens": 8, "context_length": 16}
    backend = drafting_backend(LateHash, random.Random(1), wrong=1.0, lies=False, max_drafts=3, **sizes)
    runner = Runner(backend)
    lengths = {0: (12, [1, 2, 3, 4]), 1: (5, [5, 6]), 2: (3, [7, 8]), 3: (7, [9, 10])}
    admissions = [
        admission(slot, range(1, 1 + length), blocks, num_computed=length - 1 if slot != 1 else 0)
        for slot, (length, blocks) in lengths.items()
    ]
    ready = [(slot, lengths[slot][0] - 1, 1, SAMPLE) for slot in (0, 2, 3)]
    runner.execute(1, plan(admissions=admissions, extents=[*ready, (1, 0, 2, 0)]))
    return runner, runner.launch(2, plan(extents=[(2, -1, 3, SAMPLE), (3, 7, 1, AWAIT)], drafts=[2, 0]))


@pytest.mark.parametrize(("reason", "bad"), FAULTS, ids=[reason for reason, _ in FAULTS])
def test_bad_forced_tokens_are_refused_with_a_reason_and_change_nothing(reason: str, bad: plan_pb2.Plan) -> None:
    if reason.startswith("there are 1"):
        bad = plan_pb2.Plan.FromString(bad.SerializeToString())
        bad.forced_tokens = bad.forced_tokens[:4]
    runner, _ = make_runner()
    before, tokens = runner._state._counters.copy(), runner._state._tokens.copy()
    with pytest.raises(PlanFault) as fault:
        runner.launch(3, bad)
    assert reason in str(fault.value)
    for name in ("resident", "computed", "num_tokens", "num_blocks", "spread", "recorded"):
        assert getattr(before, name).tolist() == getattr(runner._state._counters, name).tolist()
    assert (tokens == runner._state._tokens).all()
