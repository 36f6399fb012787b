"""The rules for drafts with several plans in flight (docs/architecture.md). Each test fails without its rule."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch
from scheduler_svc.model.sequence import FinishReason, Sequence
from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import Appends, Column, pack
from scheduler_svc.plan.slot_table import IntColumn
from scheduler_svc.scheduler.scheduler import Scheduler
from tests.support.drafters import drafting_backend
from tests.support.in_process import Stack, Submitted
from tests.support.scripted_drafts import Always

SIZE = 4
"""Positions per block."""


class BadAt(HashBackend):
    """The logits of one token, `bad` = (slot, position), are not finite."""

    bad = (-1, -1)

    def _finite(self, batch: StepBatch, rows: NDArray[np.intp], positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        return (batch.slots[rows] != self.bad[0]) | (positions != self.bad[1])


class Drafting:
    """A stack with one runner whose drafter knows the next tokens, and errs with probability `wrong`."""

    def __init__(
        self, wrong: float, *, depth: int = 2, blocks: int = 60, drafts: int = 3, sharing: bool = True
    ) -> None:
        self.stack = Stack(depth=depth, prefix_sharing=sharing)
        self.stack.drafts = self.drafts = Always(drafts)
        """What each row drafts, from the next plan on."""
        self.backend = drafting_backend(
            BadAt,
            random.Random(1),
            wrong=wrong,
            lies=False,
            num_slots=3,
            block_size=SIZE,
            num_blocks=blocks,
            max_step_tokens=32,
            context_length=128,
            eos_probability=0.0,
        )
        self.session = self.stack.add_runner(self.backend)
        self.stack.step()

    @property
    def scheduler(self) -> Scheduler:
        return self.stack.engine.pool.schedulers[self.session]

    def plans(self) -> list[plan_pb2.Plan]:
        """Returns the plans that were sent and are not executed."""
        return [plan for _, plan in self.stack.runners.plans[self.session]]

    def answer(self, count: int = 1) -> None:
        """Executes plans and delivers their results."""
        for _ in range(count):
            self.stack.runners.execute(self.session)
            self.stack.runners.deliver(self.session)

    def decode(self, prompt: list[int], max_tokens: int, **fields: object) -> tuple[Submitted, Sequence]:
        """Submits a request; returns it and its sequence with its first token and a plan that drafts in flight."""
        wanted, self.drafts.wanted = self.drafts.wanted, 0
        request = self.stack.submit(prompt, max_tokens, **fields)
        self.stack.step()
        self.answer(len(self.plans()) - (len(self.plans()) > 1))
        while not request.streams or not request.streams[0].tokens:
            self.stack.step()
            self.answer()
        self.answer(len(self.plans()))
        self.drafts.wanted = wanted
        self.stack.step()
        sequence = self.stack.engine.requests.book.sequence(request.first_sequence_id or 0)
        assert sequence is not None and column(self.plans()[-1], "extent_starts")[-1] == -1
        return request, sequence

    def finish(self) -> None:
        """Runs until all requests have ended, and compares their streams."""
        for _ in range(1000):
            self.stack.whole_turn(self.session)
            if self.stack.engine.requests.idle:
                break
        self.stack.step()
        self.stack.assert_clean()
        for request in self.stack.requests.values():
            for index, stream in enumerate(request.streams):
                assert stream.end is not None
                expected = request.expected(index, 0.0)
                whole = stream.end.reason in (FinishReason.LENGTH, FinishReason.STOP)
                assert stream.tokens == (expected if whole else expected[: len(stream.tokens)])


def column(plan: plan_pb2.Plan, name: str) -> list[int]:
    return np.frombuffer(getattr(plan, name), "<i4").tolist()


def test_rule_1_rows_behind_unanswered_drafts_have_no_start() -> None:
    served = Drafting(0.5, depth=2)
    served.decode([1, 2, 3], 60)
    first = served.plans()[0]
    assert column(first, "extent_starts") == [-1] and column(first, "extent_counts") == [4]
    assert list(first.extent_drafts) == [3]
    served.answer(len(served.plans()))
    served.stack.step()
    served.drafts.wanted = 0  # the plans in flight draft; the next ones do not
    served.answer()
    served.stack.step()
    behind = served.plans()[-1]
    assert column(behind, "extent_starts") == [-1] and column(behind, "extent_counts") == [1]
    assert not behind.extent_drafts
    served.answer(2)
    served.stack.step()
    for plan in served.plans():
        assert min(column(plan, "extent_starts")) > 0
    served.finish()


def test_rule_2_upper_bounds_stay_within_the_limit() -> None:
    """All drafts are wrong, so that the bounds are far apart; a row at its upper bound waits."""
    served = Drafting(1.0, depth=3, drafts=5)
    request, sequence = served.decode([1, 2, 3], 12)
    table, waited = served.scheduler.table, False
    while request.streams[0].end is None:
        served.stack.step()
        if sequence.scheduler is not None:
            in_flight = len(served.scheduler.in_flight)
            assert table.known[0] <= sequence.limit
            assert table.length[0] + in_flight == table.known[0] - table.spread[0]
            waited = waited or in_flight < 3
        served.answer()
    assert waited and served.scheduler.table.spread[0] == 0
    served.finish()


@pytest.mark.parametrize("wrong", [0.0, 1.0], ids=["accepted", "rejected"])
def test_rule_4_only_bad_values_on_the_accepted_path_count(wrong: float) -> None:
    served = Drafting(wrong, depth=1)
    other, _ = served.decode([9, 9], 40)
    request, sequence = served.decode([1, 2, 3], 40)
    known = len(sequence.tokens)
    served.backend.bad = sequence.slot, known + 2
    served.answer()
    served.stack.step()
    assert len(sequence.tokens) == known + (1 if wrong else 2) and request.streams[0].end is None
    if wrong:
        served.backend.bad = -1, -1
    served.finish()
    end = request.streams[0].end
    assert end is not None and end.reason == (FinishReason.LENGTH if wrong else FinishReason.ERROR)
    assert len(request.streams[0].tokens) == (40 if wrong else known - 3 + 2) and len(other.streams[0].tokens) == 40


def test_rule_5_blocks_are_named_only_below_the_confirmed_length() -> None:
    """The sequence leaves at a block's end, whose last position has the KV of a rejected draft."""
    served = Drafting(1.0, depth=1)
    request, sequence = served.decode([1, 2, 3], 60)
    while len(sequence.tokens) % SIZE:
        served.answer()
        served.stack.step()
    tokens = sequence.tokens.tolist()
    served.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    served.stack.step()
    again = served.stack.submit([*tokens, 5], 9)
    served.finish()
    end = again.streams[0].end
    assert end is not None and end.cached_tokens == len(tokens) - SIZE > 0


@pytest.mark.parametrize("blocks", [24, 80], ids=["tight", "cached"])
def test_rule_6_drafts_take_only_blocks_that_nothing_else_needs(blocks: int) -> None:
    """In a pool that fills with cached prefixes, and in a small one without them, in which sequences are preempted."""
    served, grown = Drafting(0.3, blocks=blocks, drafts=5, sharing=blocks > 24), [0]
    scheduler, grow = served.scheduler, PlanBuilder.grow
    pool = scheduler.pool

    def checked(plans: PlanBuilder, slots: IntColumn, counts: Column | None = None) -> Appends:
        if counts is None:  # not for drafts
            return grow(plans, slots)
        cached = pool.num_cached
        assert not served.stack.engine.requests.num_waiting, "drafts took blocks while a sequence waited"
        appends = grow(plans, slots, counts)
        assert pool.num_cached == cached, "drafts evicted a READY block"
        assert pool.num_free >= scheduler.table.num_running, "drafts left no block for the next step"
        grown.extend(np.bincount(appends.slots).tolist())
        return appends

    with mock.patch.object(PlanBuilder, "grow", checked):
        rng = random.Random(2)
        for burst in (1, 4, 1, 2, 5):
            for _ in range(burst):
                served.stack.submit([rng.randrange(9) for _ in range(rng.randint(1, 9))], rng.randint(20, 50))
            for _ in range(20):
                served.stack.whole_turn(served.session, most_plans=1)
        served.finish()
    assert max(grown) > 1, "no row got several blocks in one plan"
    assert (scheduler.preemptions > 0) == (blocks == 24)


def test_rule_7_nothing_behind_an_end_within_a_run_is_kept() -> None:
    solo = Submitted(1, engine_pb2.Submit(prompt=pack([1, 2, 3]), max_tokens=30, n=1)).expected(0, 0.0)
    sampling = plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, stop_ids=pack(solo[3:4]), logprobs=1)
    served = Drafting(0.0, drafts=5)
    request, sequence = served.decode([1, 2, 3], 30, sampling=sampling, tenant="a")
    served.decode([4, 5], 30, tenant="b")
    served.finish()
    assert request.streams[0].tokens == solo[:4] == sequence.tokens[3:].tolist()
    assert len(sequence.logprobs) == 4
    assert served.stack.engine.ledger.account("a").sampled_tokens == 4
    assert served.stack.engine.ledger.account("b").sampled_tokens == 30


def test_rule_7_a_late_run_of_a_preempted_row_ends_at_its_first_end() -> None:
    solo = Submitted(1, engine_pb2.Submit(prompt=pack([1, 2, 3]), max_tokens=30, n=1)).expected(0, 0.0)
    sampling = plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, stop_ids=pack(solo[3:4]))
    served = Drafting(0.0, drafts=5)
    request, sequence = served.decode([1, 2, 3], 30, sampling=sampling)
    assert len(served.plans()) == 2 and len(request.streams[0].tokens) < 4
    served.scheduler.departures.preempt(sequence, served.stack.engine.requests.queue)
    assert sequence.stale == 2
    served.answer(2)
    served.stack.step()
    end = request.streams[0].end
    assert end is not None and end.reason == FinishReason.STOP and request.streams[0].tokens == solo[:4]
    assert served.scheduler.dropped_rows == 1
    served.finish()
