"""Rows with drafts on a runner that has up to three plans in flight: lies of plans and drafters, failures, masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.interface.step import StepBatch
from tests.support.drafters import LateHash, drafting_backend
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling

PROMPT = [3, 1, 4, 1, 5]
OTHER = [2, 7, 1, 8]
SIZES = {"num_slots": 3, "block_size": 4, "num_blocks": 24, "max_step_tokens": 32, "context_length": 40}
KINDS = pytest.mark.parametrize("kind", [HashBackend, LateHash])
NOT_FINITE, FAILED = plan_pb2.ROW_STATUS_NOT_FINITE, plan_pb2.ROW_STATUS_FAILED


def after(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, eos_probability=0.0)


def knowing(kind: type[HashBackend] = HashBackend, max_drafts: int = 7, **options: Any) -> HashBackend:
    """Returns a backend whose drafter is always right."""
    sizes = SIZES | {"eos_probability": 0.0} | options
    return drafting_backend(kind, random.Random(1), wrong=0.0, lies=False, max_drafts=max_drafts, **sizes)


def begun(backend: HashBackend, blocks: int = 6) -> Runner:
    """Returns a runner whose slot 0 has the prompt and one token."""
    runner = Runner(backend)
    made = plan(admissions=[admission(0, PROMPT, range(1, 1 + blocks))], extents=[(0, 0, len(PROMPT), SAMPLE)])
    assert ints(runner.execute(1, made).tokens) == after(PROMPT, 1)
    return runner


def run_of(drafts: int, slot: int = 0) -> plan_pb2.Plan:
    return plan(extents=[(slot, -1, 1 + drafts, SAMPLE)], drafts=[drafts])


# ------------------------------------------------------------------ plans in flight


@KINDS
def test_three_plans_in_flight_continue_each_other(kind: type[HashBackend]) -> None:
    """The second has neither start nor drafts; nothing of the first was answered when it was sent."""
    runner = begun(knowing(kind))
    made = [run_of(3), plan(extents=[(0, -1, 1, SAMPLE)]), run_of(5)]
    flights = [runner.launch(2 + number, one) for number, one in enumerate(made)]
    results = [flight.wait() for flight in flights]
    assert [list(result.token_counts) for result in results] == [[4], [1], [6]]
    assert [list(result.drafted) for result in results] == [[3], [], [5]]
    assert [token for result in results for token in ints(result.tokens)] == after(PROMPT, 12)[1:]
    (resident,) = runner.snapshot().sequences
    assert ints(resident.tokens) == PROMPT + after(PROMPT, 12) and resident.computed == len(PROMPT) + 11
    last = runner.execute(5, plan(extents=[(0, len(PROMPT) + 11, 1, SAMPLE)]))
    assert ints(last.tokens) == after(PROMPT, 13)[12:]


@KINDS
def test_a_run_of_a_sequence_that_left_its_slot_touches_nothing_of_the_next(kind: type[HashBackend]) -> None:
    runner = begun(knowing(kind))
    left = runner.launch(2, run_of(7))
    made = plan(releases=[0], admissions=[admission(0, OTHER, range(1, 5))], extents=[(0, 0, len(OTHER), SAMPLE)])
    came, ran = runner.launch(3, made), runner.launch(4, run_of(4))
    assert ints(left.wait().tokens) == after(PROMPT, 9)[1:]
    assert ints(came.wait().tokens) + ints(ran.wait().tokens) == after(OTHER, 6)
    (resident,) = runner.snapshot().sequences
    assert ints(resident.tokens) == OTHER + after(OTHER, 6) and resident.computed == len(OTHER) + 5


@KINDS
def test_runs_beside_rows_that_await_masks(kind: type[HashBackend]) -> None:
    """The masks come after the next plan, which has runs of the others; results keep the order of the rows."""
    runner = begun(knowing(kind))
    prompts = [OTHER, [9, 9, 6]]
    made = plan(
        admissions=[admission(1, prompts[0], [7, 8]), admission(2, prompts[1], [9, 10])],
        extents=[(1, 0, 4, AWAIT), (0, -1, 3, SAMPLE), (2, 0, 3, SAMPLE)],
        drafts=[0, 2, 0],
    )
    first = runner.launch(2, made)
    second = runner.launch(3, plan(extents=[(2, -1, 4, SAMPLE), (0, -1, 1, SAMPLE)], drafts=[3, 0]))
    first.mask(masks(259, {0: [77]}))
    result, behind = first.wait(), second.wait()
    assert list(result.token_counts) == [1, 3, 1] and list(result.drafted) == [0, 2, 0]
    assert ints(result.tokens) == [77, *after(PROMPT, 4)[1:], *after(prompts[1], 1)]
    assert ints(behind.tokens) == after(prompts[1], 5)[1:] + after(PROMPT, 5)[4:]
    third = runner.execute(4, plan(extents=[(1, 4, 1, SAMPLE), (0, -1, 2, SAMPLE)], drafts=[0, 1]))
    assert ints(third.tokens) == [expected_tokens([*OTHER, 77], 1, eos_probability=0.0)[0], *after(PROMPT, 7)[5:]]


@KINDS
def test_log_probabilities_are_those_of_the_kept_tokens(kind: type[HashBackend]) -> None:
    runner = Runner(knowing(kind))
    made = plan(
        admissions=[admission(0, PROMPT, range(1, 6), sampling=sampling(logprobs=2, prompt_logprobs=1))],
        extents=[(0, 0, len(PROMPT), SAMPLE)],
    )
    results = [flight.wait() for flight in (runner.launch(1, made), runner.launch(2, run_of(3)))]
    assert len(results[0].prompt_logprobs) == 1 and not results[1].prompt_logprobs
    (scored,) = results[1].logprobs
    assert [len(column) // 4 for column in (scored.values, scored.top_ids, scored.top_values)] == [4, 8, 8]
    assert ints(scored.top_ids)[::2] == ints(results[1].tokens)


# ------------------------------------------------------------------ values that are not finite


class LosesPrecision(HashBackend):
    """The logits of the token at `at` are not finite."""

    at = 0

    def _finite(self, batch: StepBatch, rows: Any, positions: Any) -> NDArray[np.bool_]:
        finite: NDArray[np.bool_] = (batch.slots[rows] != 0) | (positions != self.at)
        return finite


class LosesPrecisionLate(LosesPrecision, LateHash):
    """The same, and it overlaps."""


@pytest.mark.parametrize("kind", [LosesPrecision, LosesPrecisionLate])
@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_a_run_is_cut_before_a_position_that_is_not_finite_and_the_next_decides(
    kind: type[LosesPrecision], place: int
) -> None:
    """The second run is launched before the first is answered; the row before it in the plan is of another sequence."""
    backend = knowing(kind)
    runner = begun(backend)
    assert isinstance(backend, LosesPrecision)
    backend.at = len(PROMPT) + 1 + place
    runner.execute(2, plan(admissions=[admission(1, OTHER, [7, 8, 9])], extents=[(1, 0, 4, SAMPLE)]))
    both = [(1, -1, 2, SAMPLE), (0, -1, 4, SAMPLE)]
    flights = [runner.launch(number, plan(extents=both, drafts=[1, 3])) for number in (3, 4, 5)]
    results = [flight.wait() for flight in flights]
    kept = [token for result in results for token in ints(result.tokens)[result.token_counts[0] :]]
    assert kept == after(PROMPT, 1 + place)[1:]
    statuses = [result.statuses[1] for result in results]
    bad = 0 if place == 0 else 1  # a run of 4 ends before the fifth position anyway
    assert statuses == [0] * bad + [NOT_FINITE] + [FAILED] * (2 - bad)
    assert all(result.token_counts[1] == 0 for result, status in zip(results, statuses, strict=True) if status)
    assert [result.statuses[0] for result in results] == [0, 0, 0]
    assert [token for result in results for token in ints(result.tokens)[: result.token_counts[0]]] == after(OTHER, 7)[
        1:
    ]
    last = runner.execute(6, plan(extents=both, drafts=[1, 3]))
    assert list(last.statuses) == [0, FAILED] and list(last.drafted) == [1, 0]


def test_a_position_behind_a_wrong_draft_may_be_anything() -> None:
    backend = drafting_backend(LosesPrecision, random.Random(1), wrong=1.0, lies=False, max_drafts=7, **SIZES)
    runner = begun(backend)
    backend.at = len(PROMPT) + 3
    result = runner.execute(2, run_of(5))
    assert list(result.token_counts) == [1] and list(result.statuses) == [0]


# ------------------------------------------------------------------ plans that lie


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (plan(extents=[(0, -1, 9, SAMPLE)], drafts=[8]), "8 drafts"),
        (plan(extents=[(0, -1, 3, SAMPLE)], drafts=[3]), "count"),
        (plan(extents=[(0, 5, 4, SAMPLE)], drafts=[3]), "must be -1"),
        (plan(extents=[(0, -1, 4, AWAIT)], drafts=[3]), "flags"),
        (plan(extents=[(0, -1, 4, 0)], drafts=[3]), "flags"),
        (plan(extents=[(0, -1, 1, 0)]), "flags"),
        (plan(extents=[(0, -2, 1, SAMPLE)]), "start"),
        (plan(extents=[(0, -1, 4, SAMPLE)], drafts=[3, 3]), "lengths"),
        (plan(extents=[(0, -1, 2, SAMPLE), (0, -1, 2, SAMPLE)], drafts=[1, 1]), "two rows"),
        (plan(extents=[(1, -1, 2, SAMPLE)], drafts=[1]), "no sequence"),
    ],
)
@KINDS
def test_a_plan_with_impossible_drafts_is_refused_and_changes_nothing(
    kind: type[HashBackend], made: plan_pb2.Plan, reason: str
) -> None:
    runner = begun(knowing(kind))
    before = runner.snapshot()
    with pytest.raises(PlanFault, match=reason):
        runner.launch(2, made)
    assert runner.snapshot() == before


@pytest.mark.parametrize(
    ("blocks", "drafts", "behind", "fits"),
    [
        (2, 2, None, True),  # 6 tokens, and positions up to 7
        (2, 3, None, False),
        (3, 3, 1, True),  # the upper bound behind the run is 10 tokens: positions 9 and 10
        (3, 3, 2, True),
        (3, 3, 3, False),
        (10, 7, 7, True),
    ],
)
@KINDS
def test_bounds_are_those_of_the_longest_runs_in_flight(
    kind: type[HashBackend], blocks: int, drafts: int, behind: int | None, fits: bool
) -> None:
    runner = begun(knowing(kind), blocks)
    flight = runner.launch(2, run_of(drafts)) if behind is not None else None
    made = run_of(drafts if behind is None else behind)
    if fits:
        runner.launch(3 if flight else 2, made)
    else:
        with pytest.raises(PlanFault, match="beyond"):
            runner.launch(3 if flight else 2, made)


@KINDS
def test_an_explicit_start_behind_a_run_is_refused_while_it_is_unanswered(kind: type[HashBackend]) -> None:
    runner = begun(knowing(kind))
    flight = runner.launch(2, run_of(3))
    upper = plan(extents=[(0, len(PROMPT) + 4, 1, SAMPLE)])
    if kind is HashBackend:
        assert ints(runner.execute(3, upper).tokens) == after(PROMPT, 6)[5:]
        return
    with pytest.raises(PlanFault, match="-1"):
        runner.launch(3, upper)
    flight.wait()


def test_a_run_of_a_prompt_that_is_not_computed_yet_is_refused() -> None:
    runner = Runner(knowing())
    runner.execute(1, plan(admissions=[admission(0, PROMPT, [1, 2, 3])], extents=[(0, 0, 3, 0)]))
    with pytest.raises(PlanFault):
        runner.launch(2, run_of(2))


@pytest.mark.parametrize("made", [run_of(1), plan(extents=[(0, -1, 1, SAMPLE)])])
def test_a_runner_without_drafter_refuses_drafts(made: plan_pb2.Plan) -> None:
    runner = begun(HashBackend(**SIZES, eos_probability=0.0))
    with pytest.raises(PlanFault, match="no drafter"):
        runner.launch(2, made)


@pytest.mark.parametrize(("blocks", "context", "most"), [(2, 40, 2), (10, 10, 3), (10, 40, 7)])
def test_the_device_clamps_drafts_that_the_check_let_through(blocks: int, context: int, most: int) -> None:
    """The batch asks for seven drafts; the blocks or the context have room for fewer."""
    backend = knowing(context_length=context)
    runner = begun(backend, min(blocks, -(-context // 4)))
    states, params = runner._state._states[:1].tolist(), runner._state._params[:1]
    one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    batch = StepBatch(
        slots=np.zeros(1, np.int32),
        starts=-one,
        counts=8 * one,
        sample=np.ones(1, np.bool_),
        tokens=none,
        positions=none,
        slot_mapping=none.astype(np.int64),
        block_tables=none.reshape(0, 0),
        params=params,
        states=states,
        drafts=7 * one,
    )
    output = backend.step(batch)
    assert output.drafted.tolist() == [most] and output.tokens.tolist() == after(PROMPT, 2 + most)[1:]


# ------------------------------------------------------------------ drafters


class Stubborn:
    """Proposes what the test says, whatever it was asked for."""

    name = "stubborn"

    def __init__(self, proposals: Callable[[], list[list[int]]]) -> None:
        self._proposals = proposals
        self.asked: list[tuple[list[int], list[int]]] = []

    def propose(self, tokens: Any, slots: Any, counters: Any, most: Any) -> Any:
        self.asked += [
            (tokens[slot, :known].tolist(), most.tolist()) for slot, known in zip(slots, counters, strict=True)
        ]
        return np.array(self._proposals(), np.int32)


@pytest.mark.parametrize(
    ("proposals", "drafted", "kept"),
    [
        ([[0, 1, 2, 3, 4]], 3, 4),  # more columns than asked for
        ([[0, 1]], 2, 3),
        ([[]], 0, 1),
        ([[-1, 1, 2]], 0, 1),
        ([[0, -1, 2]], 1, 2),
        ([[0, "vocab", 2]], 1, 2),
        ([[0, 2**31 - 1, 2]], 1, 2),
        ([[-(2**31), 1, 2]], 0, 1),
        ([[1, 1, 2]], 3, 1),
    ],
)
def test_what_a_drafter_proposes_ends_at_the_first_id_that_is_none(
    proposals: list[list[Any]], drafted: int, kept: int
) -> None:
    """Small numbers stand for the right tokens, from the next one on."""
    right = after(PROMPT, 9)[1:]
    assert right[0] != right[1]

    def told() -> list[list[int]]:
        return [[259 if n == "vocab" else right[n] if 0 <= n < 8 else n for n in row] for row in proposals]

    drafter = Stubborn(told)
    runner = begun(HashBackend(**SIZES, eos_probability=0.0, drafter=drafter, max_drafts=7))
    result = runner.execute(2, run_of(3))
    assert (list(result.drafted), list(result.token_counts)) == ([drafted], [kept])
    assert ints(result.tokens) == right[:kept] and drafter.asked == [(PROMPT + after(PROMPT, 1), [3])]
    again = runner.execute(3, plan(extents=[(0, -1, 1, SAMPLE)]))
    assert ints(again.tokens) == right[kept : kept + 1]


def test_accepting_is_blind_to_what_lies_behind() -> None:
    """Every combination of drafts right and wrong, in rows of different lengths."""
    right = after(PROMPT, 9)[1:]
    for pattern in range(16):
        wrong = [place for place in range(4) if pattern >> place & 1]
        drafter = Stubborn(lambda: [[(t + 1) % 250 if i in wrong else t for i, t in enumerate(right[:4])]])  # noqa: B023
        runner = begun(HashBackend(**SIZES, eos_probability=0.0, drafter=drafter, max_drafts=4))
        result = runner.execute(2, run_of(4))
        assert ints(result.tokens) == right[: min([*wrong, 4]) + 1]
