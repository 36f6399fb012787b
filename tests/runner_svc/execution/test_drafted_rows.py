"""Rows with drafts give each sequence the tokens that it would have got without them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.execution.runner import Runner
from runner_svc.interface.step import StepBatch
from tests.support.drafters import LateHash, drafting_backend
from tests.support.drafting_driver import EOS_PROBABILITY, VOCAB_SIZE, DraftingDriver
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling
from tests.support.thoroughness import count


@pytest.mark.parametrize("kind", [HashBackend, LateHash])
@pytest.mark.parametrize("run", range(count(100, in_ci=2)))
def test_streams_equal_those_without_drafts(kind: type[HashBackend], run: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    block_size = dice.choice([1, 3, 8, 16])
    backend = drafting_backend(
        kind,
        dice,
        wrong=dice.choice([0.0, 0.3]),
        max_drafts=dice.randint(2, 7),
        num_slots=5,
        block_size=block_size,
        num_blocks=400 // block_size,
        context_length=80,
        vocab_size=VOCAB_SIZE,
        eos_probability=EOS_PROBABILITY,
    )
    driver = DraftingDriver(backend, dice, 20, depth=3)
    driver.run()
    assert driver.drafted > 20 and driver.accepted > 5, "hardly any draft was tried"


class Broken(LateHash):
    """Its logits are not finite for the tokens at `bad` positions."""

    bad: tuple[int, ...] = ()

    def _finite(self, batch: StepBatch, rows: NDArray[np.intp], positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        return ~np.isin(positions, self.bad)


def started(wrong: float, logprobs: int | None = None) -> tuple[Runner, Broken, list[int]]:
    """Returns a runner whose slot 0 has a prompt of 4 and one sampled token, and what is sampled from there."""
    backend = drafting_backend(
        Broken, random.Random(1), wrong=wrong, lies=False, num_slots=3, block_size=4, num_blocks=30, eos_probability=0
    )
    runner = Runner(backend)
    asked = {} if logprobs is None else {"logprobs": logprobs}
    prompt = admission(0, [5, 6, 7, 8], [1, 2, 3, 4, 5], sampling=sampling(**asked))
    runner.execute(1, plan(admissions=[prompt], extents=[(0, 0, 4, SAMPLE)]))
    return runner, backend, expected_tokens([5, 6, 7, 8], 12, eos_probability=0)


def test_a_value_that_is_not_finite_ends_the_run_before_it_and_the_next_run_decides() -> None:
    runner, backend, expected = started(wrong=0.0, logprobs=1)
    backend.bad = (7,)
    run = runner.launch(2, plan(extents=[(0, -1, 4, SAMPLE)], drafts=[3]))
    behind = runner.launch(3, plan(extents=[(0, -1, 3, SAMPLE)], drafts=[2]))  # begins at the bad position
    last = runner.launch(4, plan(extents=[(0, -1, 2, SAMPLE)], drafts=[1]))  # in flight when the sequence fails
    result = run.wait()
    assert (result.statuses, result.drafted, ints(result.tokens)) == (b"\0", b"\3", expected[1:3])
    assert len(result.logprobs[0].values) == 2 * 4
    decided = behind.wait()
    assert (list(decided.statuses), decided.token_counts) == ([plan_pb2.ROW_STATUS_NOT_FINITE], b"\0")
    assert not decided.logprobs
    late = last.wait()
    assert (list(late.statuses), late.tokens, late.drafted) == ([plan_pb2.ROW_STATUS_FAILED], b"", b"\0")
    resident = runner.snapshot().sequences[0]
    assert ints(resident.tokens) == [5, 6, 7, 8, *expected[:3]]
    assert resident.computed == len(ints(resident.tokens)), "a scheduler that takes over knows by this that it failed"


def test_a_snapshot_is_sound_after_a_failure_with_later_rows_in_flight() -> None:
    """A bug found by the test above: without drafts, each later row left a computed position without a token."""
    runner, backend, _ = started(wrong=0.0)
    backend.bad = (6,)
    launched = [runner.launch(number, plan(extents=[(0, 2 + number, 1, SAMPLE)])) for number in (2, 3, 4)]
    assert [list(each.wait().statuses) for each in launched] == [[0], [1], [2]]
    resident = runner.snapshot().sequences[0]
    assert (resident.computed, len(ints(resident.tokens))) == (6, 6)


def test_after_a_run_that_was_cut_short_the_sequence_continues() -> None:
    runner, backend, expected = started(wrong=0.0)
    backend.bad = (7,)
    runner.execute(2, plan(extents=[(0, -1, 4, SAMPLE)], drafts=[3]))
    backend.bad = ()
    result = runner.execute(3, plan(extents=[(0, -1, 1, SAMPLE)]))
    assert ints(result.tokens) == expected[3:4]
    assert ints(runner.execute(4, plan(extents=[(0, 7, 1, SAMPLE)])).tokens) == expected[4:5]


def test_values_behind_a_wrong_draft_do_not_count() -> None:
    runner, backend, expected = started(wrong=1.0)
    backend.bad = (6, 7, 8)
    result = runner.execute(2, plan(extents=[(0, -1, 4, SAMPLE)], drafts=[3]))
    assert (result.statuses, ints(result.tokens)) == (b"\0", expected[1:2])


def test_a_plan_may_mix_drafts_masks_and_prompts() -> None:
    """Results of rows that wait for masks are put between the tokens of runs."""
    runner, _, expected = started(wrong=0.0, logprobs=0)
    newcomers = [admission(1, [1, 2], [11]), admission(2, [3, 4, 9], [12])]
    launched = runner.launch(
        2,
        plan(admissions=newcomers, extents=[(1, 0, 2, AWAIT), (0, -1, 4, SAMPLE), (2, 0, 3, SAMPLE)], drafts=[0, 3, 0]),
    )
    launched.mask(masks(259, {0: [77]}))
    result = launched.wait()
    other = expected_tokens([3, 4, 9], 1, eos_probability=0)
    assert (result.token_counts, result.drafted) == (b"\1\4\1", b"\0\3\0")
    assert ints(result.tokens) == [77, *expected[1:5], *other]
    assert [(entry.row, len(entry.values)) for entry in result.logprobs] == [(1, 16)]


def test_drafts_are_clamped_to_blocks_and_context_whatever_the_plan_asks_for() -> None:
    """A backend computes what it is given: the check of plans is not its only protection."""
    backend = drafting_backend(
        HashBackend,
        random.Random(1),
        wrong=0.0,
        lies=False,
        num_slots=2,
        block_size=4,
        num_blocks=8,
        context_length=16,
        eos_probability=0,
    )
    runner = Runner(backend)
    prompts = [[1, 2, 3, 4, 5], list(range(12))]
    admissions = [admission(0, prompts[0], [1, 2]), admission(1, prompts[1], [5, 6, 7, 8])]
    runner.execute(1, plan(admissions=admissions, extents=[(0, 0, 5, SAMPLE), (1, 0, 12, SAMPLE)]))
    slots = np.array([0, 1], np.int32)
    there = [backend.host_slots.admitted[slot] for slot in (0, 1)]
    untouched = backend._kv[[0, 3, 4]].copy()
    lie = StepBatch(
        slots=slots,
        starts=np.array([-1, -1], np.int32),
        counts=np.array([101, 101], np.int32),
        sample=np.ones(2, np.bool_),
        tokens=np.zeros(0, np.int32),
        positions=np.zeros(0, np.int32),
        slot_mapping=np.zeros(0, np.int64),
        block_tables=np.zeros((0, 0), np.int32),
        params=np.array([entry.params for entry in there]),
        states=[entry.state for entry in there],
        drafts=np.array([100, 100], np.int32),
    )
    output = backend.step(lie)
    assert output.drafted.tolist() == [2, 2]  # to the end of two blocks; to the token at the context's last position
    assert output.token_counts.tolist() == [3, 3]
    streams = [expected_tokens(prompt, 4, eos_probability=0)[1:] for prompt in prompts]
    assert output.tokens.tolist() == streams[0] + streams[1]
    assert (backend._kv[[0, 3, 4]] == untouched).all()
