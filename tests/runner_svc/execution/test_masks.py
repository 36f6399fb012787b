"""Rows that wait for masks: no other rows wait, with any backend, and they draw only tokens that their mask allows.

In CI the tests run with all backends except the GPU's; ROSTER_TEST_DEVICE selects a single one that computes a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.null_backend import NullBackend
from runner_svc.batch.batch_state import BatchState
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling
from tests.support.tested_backend import CPU, DETERMINISTIC, TESTED, TESTED_AND_HOST, TestedBackend, synchronize
from tests.support.tested_device import NEEDS_DEVICE
from tests.support.thoroughness import choice

SIZES = {"num_slots": 4, "block_size": 8, "num_blocks": 32, "max_step_tokens": 32}
ALLOWED = [65, 66, 200]
MADE_UP = ["hash", "null"]

pytestmark = NEEDS_DEVICE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TestedBackend], Path]:
    """Returns a function that makes a model for a device, once each."""
    return functools.cache(lambda device: device.make_model("llama", tmp_path_factory.mktemp("models") / "tiny"))


DEVICES = [*(MADE_UP if TESTED is CPU else []), *TESTED_AND_HOST]


@pytest.fixture(params=choice([*DEVICES, DETERMINISTIC] if TESTED is CPU else DEVICES, in_ci=DEVICES), ids=str)
def make(request: pytest.FixtureRequest, folders: Callable[[TestedBackend], Path]) -> Callable[[], Runner]:
    def backend() -> Backend:
        if request.param == "hash":
            return HashBackend(**SIZES, eos_probability=0)
        if request.param == "null":
            return NullBackend(**SIZES)
        return request.param.load(folders(request.param), **SIZES)

    return lambda: Runner(backend())


def vocabulary(runner: Runner) -> int:
    return runner.hello().model.vocab_size


def error_of(runner: Runner, error: float) -> float:
    """Returns the error allowed for a log-probability: none of a deterministic backend."""
    return 0.0 if runner.hello().model.numerics else error


def settle(device: str) -> None:
    """Waits for all launched work."""
    if device not in MADE_UP:
        synchronize(device)


def opening(*flags: int, temperature: float = 0.0, **asked: int) -> plan_pb2.Plan:
    """Returns a plan that admits two sequences with a prompt each."""
    settings = sampling(temperature=temperature, **asked)
    return plan(
        admissions=[
            admission(slot, [5, 6 + slot, 7], [1 + 2 * slot, 2 + 2 * slot], seed=3, sampling=settings)
            for slot in range(2)
        ],
        extents=[(slot, 0, 3, flag) for slot, flag in enumerate(flags)],
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_draws_what_its_mask_allows_and_the_others_what_they_would(
    make: Callable[[], Runner], temperature: float
) -> None:
    free = ints(make().execute(1, opening(SAMPLE, SAMPLE, temperature=temperature)).tokens)
    runner = make()
    asked = opening(AWAIT, SAMPLE, temperature=temperature)
    result = runner.execute(1, asked, masks(vocabulary(runner), {0: ALLOWED}))
    tied, other = ints(result.tokens)
    assert tied in ALLOWED and other == free[1]
    assert (result.statuses, result.token_counts) == (bytes(2), b"\1\1")
    runner = make()
    everything = masks(vocabulary(runner), {0: range(vocabulary(runner)), 1: [66]})
    result = runner.execute(1, opening(AWAIT, AWAIT, temperature=temperature), everything)
    if runner.hello().device not in MADE_UP:  # those two pick differently under a mask
        assert ints(result.tokens)[0] == free[0]
    assert ints(result.tokens)[1] == 66


def test_later_plans_do_not_wait(make: Callable[[], Runner]) -> None:
    twin = make()
    both = [twin.execute(1, opening(AWAIT, SAMPLE), masks(vocabulary(twin), {0: ALLOWED}))]
    both.append(twin.execute(2, plan(extents=[(1, 3, 1, SAMPLE)])))
    both.append(twin.execute(3, plan(extents=[(0, 3, 1, AWAIT), (1, 4, 1, SAMPLE)]), masks(vocabulary(twin), {0: [9]})))
    runner = make()
    first = runner.launch(1, opening(AWAIT, SAMPLE))
    second = runner.launch(2, plan(extents=[(1, 3, 1, SAMPLE)]))
    device = runner.hello().device
    settle(device)
    assert second.done() and not first.done() and first.awaits_masks
    with pytest.raises(RuntimeError, match="waits for masks"):
        first.wait()
    first.mask(masks(vocabulary(runner), {1: [1], 7: [1]}))  # for rows that wait for no mask
    first.mask(masks(vocabulary(runner), {0: ALLOWED}))
    settle(device)
    assert first.done()
    first.mask(masks(vocabulary(runner), {0: [1]}))  # a second mask is ignored
    results = [first.wait(), second.wait()]
    third = runner.launch(3, plan(extents=[(0, 3, 1, AWAIT), (1, 4, 1, SAMPLE)]))
    third.mask(masks(vocabulary(runner), {0: [9]}))
    results.append(third.wait())
    assert [ints(result.tokens) for result in results] == [ints(result.tokens) for result in both]
    snapshots = [each.snapshot().sequences for each in (runner, twin)]
    assert snapshots[0] == snapshots[1]


def test_log_probabilities_are_of_what_is_allowed(make: Callable[[], Runner]) -> None:
    runner = make()
    if runner.hello().device in MADE_UP:
        pytest.skip("its log-probabilities are made up")
    result = runner.execute(1, opening(AWAIT, AWAIT, logprobs=2), masks(vocabulary(runner), {0: ALLOWED, 1: [66]}))
    by_row = {entry.row: entry for entry in result.logprobs}
    likeliest = np.frombuffer(by_row[0].top_ids, "<i4")
    assert set(likeliest.tolist()) < set(ALLOWED) and likeliest[0] == ints(result.tokens)[0]
    assert 0 < np.exp(np.frombuffer(by_row[0].top_values, "<f4")).sum() < 1
    assert np.frombuffer(by_row[1].values, "<f4").tolist() == [0.0]
    assert np.frombuffer(by_row[1].top_values, "<f4")[1] < -1e30


def test_a_plan_that_is_abandoned_leaves_its_other_rows_as_they_are(make: Callable[[], Runner]) -> None:
    runner = make()
    launched = runner.launch(1, opening(AWAIT, SAMPLE))
    launched.abandon()
    runner.resume()
    waiting, other = runner.snapshot().sequences
    assert (len(waiting.tokens), waiting.computed) == (12, 3)
    assert (len(other.tokens), other.computed) == (16, 3)


NEWCOMER = [65, 66, 200, 66, 65, 66, 200, 65, 66, 65, 200, 66]
"""Its prompt has only tokens that masks allow, so that penalties that count them would change the draw."""


def settle_in(runner: Runner, number: int, releases: list[int]) -> plan_pb2.Result:
    """Executes a plan that admits the newcomer to slot 0 and computes the first chunk of its prompt."""
    entering = admission(0, NEWCOMER, [9, 10], sampling=sampling(logprobs=1))
    return runner.execute(number, plan(releases=releases, admissions=[entering], extents=[(0, 0, 3, 0)]))


def finish_prompt(runner: Runner, number: int) -> tuple[list[int], float]:
    """Returns the newcomer's first token and its log-probability."""
    result = runner.execute(number, plan(extents=[(0, 3, 9, SAMPLE)]))
    ((logprob,),) = (np.frombuffer(entry.values, "<f4") for entry in result.logprobs)
    return ints(result.tokens), float(logprob)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("way", ["released", "another session"])
def test_a_token_that_is_drawn_late_is_not_written_into_anothers_slot(
    make: Callable[[], Runner], way: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check it would be written into a part of the prompt that is yet to be read."""
    if not checked:
        monkeypatch.setattr(BatchState, "outlived", lambda self, applied, rows: np.zeros(len(rows), np.bool_))
    alone = make()
    if alone.hello().device == "null":
        pytest.skip("it reads no tokens")
    settle_in(alone, 1, [])
    expected = finish_prompt(alone, 2)
    runner = make()
    held = runner.launch(1, opening(AWAIT, SAMPLE))
    if way == "released":
        ahead = runner.launch(2, plan(releases=[1]))
        settled = settle_in(runner, 3, [0])
    else:
        runner.reset()
        settled = settle_in(runner, 1, [])
    held.mask(masks(vocabulary(runner), {0: [9]}))
    if way == "released":
        assert ints(held.wait().tokens)[0] == 9, "a preempted sequence continues with it"
        assert ahead.wait() is not None
    assert settled.token_counts == b"\0"
    tokens, logprob = finish_prompt(runner, 4 if way == "released" else 2)
    same = tokens == expected[0] and abs(logprob - expected[1]) <= error_of(runner, 1e-3)
    assert same == checked, (tokens, logprob, expected)


def test_a_row_that_has_left_draws_what_it_would_have_drawn(make: Callable[[], Runner]) -> None:
    """Penalties count the tokens of the row's sequence, not those of the slot's next sequence."""
    asked = {"repetition_penalty": 1.7, "presence_penalty": 0.9, "frequency_penalty": 0.4, "logprobs": 2}
    results = []
    for leaves in (False, True):
        runner = make()
        ids = [5, 65, 200]  # tokens of its own prompt and of the other's
        allowed = masks(vocabulary(runner), {0: ids, 1: ids})
        held = runner.launch(1, opening(AWAIT, AWAIT, temperature=1.0, **asked))
        if leaves:
            settle_in(runner, 2, [0])
        held.mask(allowed)
        results.append(held.wait())
    stayed, left = results
    assert ints(left.tokens) == ints(stayed.tokens)
    for mine, wanted in zip(left.logprobs, stayed.logprobs, strict=True):
        assert (mine.row, mine.top_ids) == (wanted.row, wanted.top_ids)
        values = np.frombuffer(mine.values, "<f4"), np.frombuffer(wanted.values, "<f4")
        np.testing.assert_allclose(*values, rtol=error_of(runner, 1e-7), atol=error_of(runner, 1e-3))


def test_a_token_that_waits_for_its_mask_can_not_be_read(make: Callable[[], Runner]) -> None:
    runner = make()
    runner.launch(1, opening(AWAIT, SAMPLE))
    with pytest.raises(PlanFault, match="end 4 is beyond the 3 tokens known"):
        runner.launch(2, plan(extents=[(0, 3, 1, SAMPLE)]))


def test_a_draw_that_fails_is_the_plans_fault(make: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no result without the tokens of the failed draw."""

    def fails(self: BatchState, applied: object, rows: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(BatchState, "outlived", fails)
    runner = make()
    held = runner.launch(1, opening(AWAIT, SAMPLE))
    with pytest.raises(PlanFault, match="no room"):
        held.mask(masks(vocabulary(runner), {0: ALLOWED}))
    with pytest.raises(PlanFault, match="no room"):
        held.wait()


def test_a_mask_of_another_size_is_a_fault(make: Callable[[], Runner]) -> None:
    runner = make()
    launched = runner.launch(1, opening(AWAIT, SAMPLE))
    with pytest.raises(PlanFault, match="the mask of row 0 has 8 bytes"):
        launched.mask(masks(64, {0: [1]}))


def test_a_row_that_failed_needs_no_mask() -> None:
    """Its sequence has a token outside the vocabulary."""
    runner = Runner(HashBackend(**SIZES, eos_probability=0))
    bad = admission(0, [5, 100_000], [1])
    launched = runner.launch(1, plan(admissions=[bad], extents=[(0, 0, 2, AWAIT)]))
    assert not launched.awaits_masks
    assert launched.wait().statuses == bytes([plan_pb2.ROW_STATUS_FAILED])


def test_plans_without_rows_await_nothing() -> None:
    runner = Runner(HashBackend(**SIZES))
    assert not runner.launch(1, plan()).awaits_masks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_computed_at_once_as_one_by_one(make: Callable[[], Runner], temperature: float) -> None:
    """The row's own draw, a neighbour's, the next step and the snapshot equal those of tokens drawn by their masks."""
    runner, twin = make(), make()
    everything, only = range(vocabulary(runner)), {0: [66]}
    for each in (runner, twin):
        asked = opening(AWAIT, SAMPLE, temperature=temperature, presence_penalty=1.5, logprobs=2)
        each.execute(1, asked, masks(vocabulary(each), only))
    run = [200, 65, 66, 66, 9, 10]
    for number, token in enumerate(run, 2):
        result = twin.execute(number, plan(extents=[(0, number + 1, 1, AWAIT)]), masks(vocabulary(twin), {0: [token]}))
        assert ints(result.tokens) == [token]
    expected = twin.execute(8, plan(extents=[(0, 9, 1, AWAIT)]), masks(vocabulary(twin), {0: everything}))
    beside = twin.execute(9, plan(extents=[(1, 3, 1, SAMPLE), (0, 10, 1, SAMPLE)]))
    step = plan(extents=[(0, 3, 7, AWAIT), (1, 3, 1, SAMPLE)], forced=[run, []])
    got = runner.execute(2, step, masks(vocabulary(runner), {0: everything}))
    last = runner.execute(3, plan(extents=[(0, 10, 1, SAMPLE)]))
    if runner.hello().device != "null":
        assert ints(got.tokens) == [*ints(expected.tokens), ints(beside.tokens)[0]]
        assert ints(last.tokens) == ints(beside.tokens)[1:]
        for one, other in zip(runner.snapshot().sequences, twin.snapshot().sequences, strict=True):
            assert (ints(one.tokens), one.computed) == (ints(other.tokens), other.computed)
    if runner.hello().device not in MADE_UP:
        (alone,), (first, _) = expected.logprobs, sorted(got.logprobs, key=lambda entry: entry.row)
        if runner.hello().model.numerics:
            assert first.values == alone.values
        assert alone.top_ids == first.top_ids
        # A GPU computes in bfloat16, in another order for seven positions than for one.
        atol = 1e-4 if runner.hello().device == "cpu" else 2e-2
        np.testing.assert_allclose(np.frombuffer(first.values, "<f4"), np.frombuffer(alone.values, "<f4"), atol=atol)
