"""Plans that continue the last one leave the slots as if each had been fully checked and applied."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest

from roster_protos import plan_pb2
from runner_svc.batch.batch_state import AppliedPlan, BatchState
from runner_svc.batch.plan_check import Limits, SlotCounters
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.interface.step import StepOutput
from tests.support.plans import SAMPLE, admission, plan
from tests.support.thoroughness import count

LIMITS = Limits(
    num_slots=6,
    num_blocks=200,
    block_size=4,
    max_step_tokens=64,
    context_length=60,
    vocab_size=100,
    max_drafts=3,
)


class Whole(BatchState):
    """The reference: fully checks and records every plan."""

    def apply(self, plan: plan_pb2.Plan) -> AppliedPlan:
        applied = super().apply(plan)
        self._continuation = None
        return applied


class Counted(BatchState):
    """Counts the plans that took the fast path."""

    followed = drafted = 0

    def _continue(self, plan: plan_pb2.Plan) -> AppliedPlan | None:
        applied = super()._continue(plan)
        self.followed += applied is not None
        self.drafted += applied is not None and applied.drafts
        return applied


class Pair:
    """Applies the same plans to both states and compares the outcomes."""

    def __init__(self) -> None:
        self.fast, self.slow = Counted(LIMITS, gathers_inputs=True), Whole(LIMITS, gathers_inputs=True)

    def apply(self, asked: plan_pb2.Plan) -> tuple[AppliedPlan, AppliedPlan] | None:
        """Applies a plan; returns None if both refuse it with the same text."""
        outcomes: list[AppliedPlan | str] = []
        for state in (self.fast, self.slow):
            try:
                outcomes.append(state.apply(asked))
            except PlanFault as fault:
                outcomes.append(str(fault))
        self.compare_states()
        fast, slow = outcomes
        if isinstance(fast, str) or isinstance(slow, str):
            assert fast == slow
            return None
        compare(fast, slow)
        return fast, slow

    def record(
        self, applied: tuple[AppliedPlan, AppliedPlan], failing: set[int], accepted: dict[int, int] | None = None
    ) -> list[int]:
        """Records a token for each row, except rows of slots in `failing`, which are not finite.

        `accepted`: accepted drafts by slot, if the plan has drafts. Returns the slots of failed rows.
        """
        outputs = []
        for state, each in zip((self.fast, self.slow), applied, strict=True):
            if each.batch is None:
                return []
            rows = np.flatnonzero(each.batch.sample)
            finite = ~np.isin(each.batch.slots[rows], list(failing))
            if accepted is None:
                tokens = (each.batch.slots[rows] + 7).astype(np.int32)
                output = StepOutput.sampled(len(each.batch.slots), rows, tokens, finite)
            else:
                counts = np.array([1 + accepted[slot] for slot in each.batch.slots.tolist()], np.uint8) * finite
                draws = np.arange(4 * len(rows), dtype=np.int32).reshape(len(rows), 4)
                output = StepOutput.verified(rows, draws, counts, (~finite).astype(np.uint8), each.batch.drafts)
            state.record(each, output)
            outputs.append(output)
        np.testing.assert_array_equal(outputs[0].statuses, outputs[1].statuses)
        self.compare_states()
        return each.batch.slots[outputs[0].statuses != 0].tolist()

    def compare_states(self) -> None:
        for field in fields(SlotCounters):
            values = [getattr(state._counters, field.name) for state in (self.fast, self.slow)]
            np.testing.assert_array_equal(*values, err_msg=field.name)
        np.testing.assert_array_equal(self.fast._tables, self.slow._tables)
        np.testing.assert_array_equal(self.fast._tokens, self.slow._tokens)
        assert self.fast.residents() == self.slow.residents()


def compare(fast: AppliedPlan, slow: AppliedPlan) -> None:
    assert fast.num_rows == slow.num_rows
    for name in ("rows", "epochs", "copy_sources", "copy_targets"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), err_msg=name)
    for name in ("append_slots", "append_indexes", "append_blocks"):
        np.testing.assert_array_equal(getattr(fast.changes, name), getattr(slow.changes, name), err_msg=name)
    assert len(fast.changes.admitted) == len(slow.changes.admitted)
    assert (fast.batch is None) == (slow.batch is None)
    if fast.batch is None or slow.batch is None:
        return
    assert fast.drafts == slow.drafts
    for name in ("slots", "starts", "counts", "sample", "awaits", "params", "drafts", "lowest", "highest"):
        np.testing.assert_array_equal(getattr(fast.batch, name), getattr(slow.batch, name), err_msg=name)
    assert [state.sequence_id for state in fast.batch.states] == [state.sequence_id for state in slow.batch.states]


class Scheduling:
    """Plans of sequences that arrive, decode and leave, and faulty copies of plans."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_block = 0
        self.lengths: dict[int, int] = {}  # tokens by slot, upper bounds
        self._tables: dict[int, int] = {}
        self._unanswered: dict[int, list[int]] = {}  # drafts of the rows in flight, by slot
        self._admitted = 0
        self._sequences: dict[int, int] = {}
        self._drafts: dict[int, int] = {}  # of the last plan that drafted, by slot

    def block(self) -> int:
        self._next_block = self._next_block % LIMITS.num_blocks + 1
        return self._next_block

    def coming_and_going(self, failed: set[int]) -> plan_pb2.Plan:
        """Returns a plan that releases failed and random sequences and admits new ones; the others have no row."""
        free = sorted(set(range(LIMITS.num_slots)) - set(self.lengths))
        leaving = [slot for slot in self.lengths if slot in failed or self._rng.random() < 0.3]
        for slot in leaving:
            self.drop(slot)
        admissions, extents = [], []
        for slot in free[: self._rng.randint(0, 3)]:
            length = self._rng.randint(1, 12)
            blocks = [self.block() for _ in range(-(-length // LIMITS.block_size))]
            admissions.append(admission(slot, [self._rng.randrange(100) for _ in range(length)], blocks))
            extents.append((slot, 0, length, SAMPLE))
            self.lengths[slot], self._tables[slot] = length + 1, len(blocks)
            self._admitted += 1
            self._sequences[slot], self._unanswered[slot] = self._admitted, [0]
        return plan(releases=leaving, admissions=admissions, extents=extents)

    def decoding(self, slots: list[int], drafting: bool = False) -> plan_pb2.Plan:
        """Returns a plan that decodes a position of each slot, and drafts if asked, with the blocks that they need."""
        appends, extents, counts = [], [], []
        again = self._rng.random() < 0.8
        for slot in slots:
            most = min(3, LIMITS.context_length - 1 - self.lengths[slot])
            drafts = self._rng.randint(0, most) if drafting else 0
            if drafting and again:
                drafts = min(most, self._drafts.get(slot, 1))
            self._drafts[slot] = drafts if drafting else self._drafts.get(slot, 1)
            start, open_ended = self.lengths[slot] - 1, drafts > 0 or sum(self._unanswered[slot]) > 0
            while start + drafts >= self._tables[slot] * LIMITS.block_size:
                appends.append((slot, self._tables[slot], self.block()))
                self._tables[slot] += 1
            extents.append((slot, -1 if open_ended else start, 1 + drafts, SAMPLE))
            self.lengths[slot] += 1 + drafts
            self._unanswered[slot].append(drafts)
            counts.append(drafts)
        return plan(appends=appends, extents=extents, drafts=counts if drafting else ())

    def flight(self, asked: plan_pb2.Plan) -> list[tuple[int, int]]:
        """Returns slot and sequence of each row of a plan just made, for `answer`."""
        return [(slot, self._sequences[slot]) for slot in np.frombuffer(asked.extent_slots, "<i4").tolist()]

    def answer(self, flight: list[tuple[int, int]], asked: plan_pb2.Plan) -> dict[int, int] | None:
        """Returns the drafts that each slot accepts, at random, or None if the plan has none; corrects the bounds."""
        accepted = {}
        for (slot, sequence), drafts in zip(flight, asked.extent_drafts or bytes(len(flight)), strict=True):
            accepted[slot] = self._rng.randint(0, drafts)
            if self._sequences.get(slot) == sequence:
                self._unanswered[slot].pop(0)
                self.lengths[slot] -= drafts - accepted[slot]
        return accepted if asked.extent_drafts else None

    def drop(self, slot: int) -> None:
        del self.lengths[slot], self._tables[slot], self._unanswered[slot], self._sequences[slot]

    def spoilt(self, asked: plan_pb2.Plan) -> plan_pb2.Plan:
        """Returns a copy with one wrong number, or sometimes a column of the wrong length."""
        copy = plan_pb2.Plan.FromString(asked.SerializeToString())
        columns = ["append_slots", "append_indexes", "append_blocks", "extent_slots", "extent_starts", "extent_counts"]
        name = self._rng.choice([name for name in columns if getattr(copy, name)])
        values = np.frombuffer(getattr(copy, name), "<i4").copy()
        place = self._rng.randrange(len(values))
        values[place] = self._rng.choice([-1, 0, 1, 2, 5, 6, values[place] + 1, values[place] - 1, 201, 1 << 30])
        setattr(copy, name, values.tobytes())
        if self._rng.random() < 0.1:
            setattr(copy, name, getattr(copy, name)[:-4])
        return copy


@pytest.mark.parametrize("run", range(count(200, in_ci=8)))
def test_the_slots_equal_those_of_the_reference(run: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    both, scheduling = Pair(), Scheduling(rng)
    under_way: list[tuple[tuple[AppliedPlan, AppliedPlan], list[tuple[int, int]], plan_pb2.Plan]] = []
    failed: set[int] = set()
    drafts_often = rng.random() < 0.5
    for _ in range(120):
        in_context = [slot for slot, length in scheduling.lengths.items() if length < LIMITS.context_length]
        if not in_context or rng.random() < (0.3 if failed else 0.06):
            asked, failed = scheduling.coming_and_going(failed), set()
        elif rng.random() < 0.1:
            asked = scheduling.decoding(rng.sample(in_context, rng.randint(1, len(in_context))), rng.random() < 0.5)
        else:
            asked = scheduling.decoding(in_context, drafts_often and rng.random() < 0.97)
        if rng.random() < 0.1 and asked.extent_slots:
            wrong = scheduling.spoilt(asked)
            if wrong != asked and both.apply(wrong) is not None:
                return  # the wrong plan was valid by chance, so the later plans no longer fit
        applied = both.apply(asked)
        assert applied is not None
        under_way.append((applied, scheduling.flight(asked), asked))
        if len(under_way) == 2:
            failing = {rng.randrange(LIMITS.num_slots)} if rng.random() < 0.03 else set()
            done, flight, sent = under_way.pop(0)
            failed.update(both.record(done, failing, scheduling.answer(flight, sent)))
    print(f"{both.fast.followed} followed, {both.fast.drafted} of them drafted")
    assert both.fast.followed > (5 if drafts_often else 20)
    assert both.fast.drafted > 0 or not drafts_often


def test_a_continuation_ends_with_a_failure_and_with_a_session() -> None:
    both = Pair()
    admissions = [admission(slot, [1, 2], [1 + 5 * slot + i for i in range(5)]) for slot in range(3)]
    applied = both.apply(plan(admissions=admissions, extents=[(slot, 0, 2, SAMPLE) for slot in range(3)]))
    assert applied is not None
    both.record(applied, set())
    for start in (2, 3, 4):
        applied = both.apply(plan(extents=[(slot, start, 1, SAMPLE) for slot in range(3)]))
        assert applied is not None
        assert both.record(applied, {1} if start == 4 else set()) == ([1] if start == 4 else [])
    assert both.fast.followed == 2
    applied = both.apply(plan(extents=[(slot, 5, 1, SAMPLE) for slot in range(3)]))
    assert applied is not None and applied[0].rows.tolist() == [0, 2]
    for state in (both.fast, both.slow):
        state.reset()
    assert both.apply(plan(extents=[(slot, 6, 1, SAMPLE) for slot in range(3)])) is None
