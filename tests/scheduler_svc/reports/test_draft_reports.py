"""Drafts as observers see them: usage, metrics, status, the roster view and step reports tell the same."""

from __future__ import annotations

import random

from roster_protos import engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.reports.completed_steps import CompletedSteps
from tests.support.drafters import drafting_backend
from tests.support.in_process import Stack
from tests.support.lockstep import advance
from tests.support.plans import sampling
from tests.support.scripted_drafts import Always, RandomDrafts

MOST = 5


def drafting_stack(rng: random.Random, **settings: object) -> Stack:
    stack = Stack(**settings)
    sizes = {"num_slots": 4, "block_size": 4, "num_blocks": 30, "max_step_tokens": 30, "context_length": 96}
    stack.add_runner(drafting_backend(HashBackend, rng, eos_probability=0.02, max_drafts=MOST, **sizes))
    return stack


def test_all_observers_count_the_same() -> None:
    rng = random.Random(5)
    stack = drafting_stack(rng, depth=2)
    stack.front.put(watch=engine_pb2.Watch(on=True))
    stack.drafts = RandomDrafts(rng)
    requests = [
        stack.submit([1, 2, number], 40, seed=number, sampling=sampling(), no_speculation=number % 3 == 0)
        for number in range(9)
    ]
    seen: dict[str, tuple[int, int]] = {}
    while not all(request.streams and request.streams[0].end for request in requests):
        advance(stack, 1)
        stack.front.put(roster_query=engine_pb2.RosterQuery(handle=1))
        for message in stack.others[-1:]:
            for row in message.roster_reply.roster.running:
                seen[row.sequence.request_id] = row.drafted_tokens, row.accepted_tokens
    stack.run(rng)
    ends = [request.streams[0].end for request in requests]
    assert all(end is not None and end.drafted_tokens == end.accepted_tokens == 0 for end in ends[::3]), "it refused"
    told = [(end.drafted_tokens, end.accepted_tokens, end.num_tokens) for end in ends if end is not None]
    assert all(drafted > accepted and accepted < tokens for drafted, accepted, tokens in told[1::3] if drafted > 9)
    last_seen = [seen[f"r{request.handle}"] for request in requests]
    assert all(now[0] <= total[0] and now[1] <= total[1] for now, total in zip(last_seen, told, strict=True))
    assert sum(drafted for drafted, _ in last_seen) > 0.5 * sum(drafted for drafted, *_ in told) > 10

    snapshot = stack.engine.snapshots.take_snapshot()
    totals, (state,) = snapshot.status.totals, snapshot.drafts.values()
    assert (totals.drafted_tokens, totals.accepted_tokens) == (sum(state.drafted), sum(state.accepted))
    assert list(snapshot.drafts) == ["mixed"] == [runner.drafter for runner in snapshot.status.runners]
    assert [runner.max_drafts for runner in snapshot.status.runners] == [MOST] == [len(state.drafted)]
    assert sorted(state.drafted, reverse=True) == list(state.drafted)
    # Rows of a sequence that had ended are in the totals alone.
    assert sum(drafted for drafted, *_ in told) <= totals.drafted_tokens
    assert sum(accepted for _, accepted, _ in told) <= totals.accepted_tokens < totals.drafted_tokens
    prompts = len(requests) + totals.preemptions  # each samples a token in a row that does not decode
    assert totals.decode_rows >= totals.sampled_tokens - totals.accepted_tokens - prompts

    steps, done = CompletedSteps(), []
    for message in stack.others:
        if message.HasField("step_report"):
            steps.sent(message.step_report)
        elif message.HasField("step_done") and (report := steps.done(message.step_done)) is not None:
            done.append(report)
    rows = [row for report in done for row in report.rows]
    assert all(row.accepted <= row.drafted <= row.drafts == max(0, row.count - 1) for row in rows if row.drafts)
    assert sum(row.drafted for row in rows) == totals.drafted_tokens
    assert sum(row.accepted for row in rows) == totals.accepted_tokens


def test_an_accepted_draft_is_no_more_than_a_token_that_is_left() -> None:
    """A stop string cuts tokens whose drafts were counted; the usage never exceeds the answer."""
    rng = random.Random(1)
    stack = drafting_stack(rng)
    stack.drafts = Always(MOST)
    request = stack.submit([1, 2, 3], 60, seed=4, sampling=sampling(temperature=0.0))
    while not request.streams or len(request.streams[0].tokens) < 12:
        advance(stack, 1)
    (sequence,) = next(iter(stack.engine.pool.schedulers.values())).table.running()
    stack.front.put(cut=engine_pb2.Cut(sequence_id=sequence.id, num_tokens=1, stop_string="x"))
    stack.run(rng)
    end = request.streams[0].end
    assert end is not None and end.stop_string == "x" and end.num_tokens == 1 >= end.accepted_tokens
    assert end.drafted_tokens > 1
