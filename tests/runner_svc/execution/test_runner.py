"""Semantics of plans: order of application, chunks, the token buffer, late rows, failures, sessions, snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from tests.support.garbage import in_own_process
from tests.support.plans import SAMPLE, admission, ints, plan, sampling
from tests.support.spy_backend import SpyBackend


@pytest.fixture
def backend() -> SpyBackend:
    return SpyBackend()


@pytest.fixture
def runner(backend: SpyBackend) -> Runner:
    return Runner(backend, "spy")


def test_hello_reports_the_backends_sizes(runner: Runner, backend: SpyBackend) -> None:
    hello = runner.hello()
    assert (hello.protocol_version, hello.runner_id, hello.device) == (1, "spy", "null")
    assert (hello.num_slots, hello.block_size, hello.num_blocks, hello.max_step_tokens) == (4, 4, 20, 32)
    assert hello.max_depth >= 1 and hello.tile_tokens == 1
    assert hello.model == backend.model


def test_one_plan_releases_admits_appends_copies_and_computes_in_this_order(
    runner: Runner, backend: SpyBackend
) -> None:
    runner.execute(1, plan(admissions=[admission(1, [5] * 8, [3, 4])], extents=[(1, 0, 8, 0)]))
    backend.calls.clear()
    result = runner.execute(
        2,
        plan(
            releases=[1],
            admissions=[admission(1, [6, 7, 8, 9, 10], [9], num_computed=2)],  # takes the slot just released
            appends=[(1, 1, 12)],  # its index counts from the admission's table
            copies=[(3, 9)],
            extents=[(1, 2, 3, SAMPLE)],  # needs the appended block
        ),
    )
    assert [name for name, _ in backend.calls] == ["copy", "step"]
    assert backend.calls[0][1] == [(3, 9)]
    batch = backend.batches[0]
    assert batch.tokens.tolist() == [8, 9, 10]
    assert batch.positions.tolist() == [2, 3, 4]
    assert batch.slot_mapping.tolist() == [9 * 4 + 2, 9 * 4 + 3, 12 * 4]
    assert batch.block_tables.tolist() == [[9, 12]]
    assert batch.states[0].sequence_id == 101
    assert ints(result.tokens) == [10]


def test_a_batch_is_ragged_and_in_the_plans_order(runner: Runner, backend: SpyBackend) -> None:
    admissions = [admission(0, [1, 2, 3, 4, 5, 6], [1, 2]), admission(3, [7, 8, 9], [5]), admission(2, [4], [6])]
    result = runner.execute(
        1, plan(admissions=admissions, extents=[(3, 0, 3, SAMPLE), (0, 0, 5, 0), (2, 0, 1, SAMPLE)])
    )
    batch = backend.batches[0]
    assert batch.tokens.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 4, 5, 6, 7, 8, 24]
    assert batch.block_tables.tolist() == [[5, 0], [1, 2], [6, 0]]  # padded with the dummy block
    assert batch.ends.tolist() == [3, 5, 1]
    assert list(result.statuses) == [0, 0, 0]
    assert list(result.token_counts) == [1, 0, 1]
    assert ints(result.tokens) == [10, 12]


def test_batch_arrays_have_the_types_of_the_contract(runner: Runner, backend: SpyBackend) -> None:
    runner.execute(1, plan(admissions=[admission(0, [1, 2], [1])], extents=[(0, 0, 2, SAMPLE)]))
    runner.execute(2, plan(extents=[(0, 2, 1, SAMPLE)]))
    for batch in backend.batches:
        for name in ("slots", "starts", "counts", "tokens", "positions", "block_tables"):
            assert getattr(batch, name).dtype == np.int32, name
        assert batch.slot_mapping.dtype == np.int64
        assert batch.sample.dtype == np.bool_


def test_a_row_in_mid_prefill_leaves_the_prompt_alone_and_a_sampled_token_is_the_next_input(
    runner: Runner, backend: SpyBackend
) -> None:
    prompt = [21, 22, 23, 24, 25]
    runner.execute(1, plan(admissions=[admission(0, prompt, [1, 2])], extents=[(0, 0, 2, 0)]))
    runner.execute(2, plan(extents=[(0, 2, 2, 0)]))
    runner.execute(3, plan(extents=[(0, 4, 1, SAMPLE)]))
    runner.execute(4, plan(extents=[(0, 5, 1, SAMPLE)]))
    assert [batch.tokens.tolist() for batch in backend.batches] == [[21, 22], [23, 24], [25], [10]]
    assert ints(runner.snapshot().sequences[0].tokens) == [*prompt, 10, 10]


def test_a_late_row_of_a_sequence_that_ended_is_computed_and_its_slot_free_in_the_next_plan(
    runner: Runner, backend: SpyBackend
) -> None:
    runner.execute(1, plan(admissions=[admission(0, [1, 2], [1])], extents=[(0, 0, 2, SAMPLE)]))
    assert ints(runner.execute(2, plan(extents=[(0, 2, 1, SAMPLE)])).tokens) == [10]
    runner.execute(3, plan(releases=[0], admissions=[admission(0, [9], [1])], extents=[(0, 0, 1, SAMPLE)]))
    assert backend.batches[-1].tokens.tolist() == [9]
    assert backend.batches[-1].states[0].prompt_len == 1


def test_nothing_of_an_earlier_sequence_is_left_in_its_slot(runner: Runner, backend: SpyBackend) -> None:
    runner.execute(1, plan(admissions=[admission(0, [1] * 12, [1, 2, 3])], extents=[(0, 0, 12, SAMPLE)]))
    short = admission(0, [2, 3], [4])
    runner.execute(2, plan(releases=[0], admissions=[short, admission(1, [1] * 12, [5, 6, 7])]))
    runner.execute(3, plan(extents=[(0, 0, 2, 0), (1, 0, 12, 0)]))
    assert backend.batches[-1].block_tables.tolist() == [[4, 0, 0], [5, 6, 7]]


def test_a_plan_without_rows_is_executed(runner: Runner, backend: SpyBackend) -> None:
    result = runner.execute(1, plan())
    assert (result.statuses, result.token_counts, result.tokens) == (b"", b"", b"")
    assert runner.execute(2, plan(copies=[(1, 2)])).statuses == b""
    assert backend.calls == [("copy", [(1, 2)])]
    assert runner.last_plan == 2


def test_a_sequence_that_is_not_finite_fails_alone_and_for_good(runner: Runner, backend: SpyBackend) -> None:
    both = [admission(slot, [1, 2], [slot + 1], sampling=sampling(logprobs=0)) for slot in (0, 1)]
    backend.bad_slots = {0}
    first = runner.execute(1, plan(admissions=both, extents=[(0, 0, 2, SAMPLE), (1, 0, 2, SAMPLE)]))
    assert list(first.statuses) == [plan_pb2.ROW_STATUS_NOT_FINITE, 0]
    assert list(first.token_counts) == [0, 1]
    assert ints(first.tokens) == [11]
    # The next row was planned before the failure was known: it is not a fault, and the other sequence continues.
    backend.bad_slots = set()
    second = runner.execute(2, plan(extents=[(0, 2, 1, SAMPLE), (1, 2, 1, SAMPLE)]))
    assert list(second.statuses) == [plan_pb2.ROW_STATUS_FAILED, 0]
    assert list(second.token_counts) == [0, 1]
    assert ints(second.tokens) == [10]
    assert [logprobs.row for logprobs in second.logprobs] == [1]  # the plan's row, not the batch's
    # A plan with only this row needs no step.
    steps = len(backend.batches)
    assert list(runner.execute(3, plan(extents=[(0, 3, 1, SAMPLE)])).statuses) == [plan_pb2.ROW_STATUS_FAILED]
    assert len(backend.batches) == steps
    # The slot's next sequence is not affected.
    third = runner.execute(4, plan(releases=[0], admissions=[admission(0, [3], [1])], extents=[(0, 0, 1, SAMPLE)]))
    assert list(third.statuses) == [0]


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": [1, 259]},
        {"tokens": [-1, 2]},
        {"sampling": sampling(temperature=float("nan"))},
        {"sampling": sampling(temperature=-1)},
        {"sampling": sampling(top_p=float("inf"))},
        {"sampling": sampling(repetition_penalty=0)},
        {"sampling": sampling(stop_ids=[259])},
        {"sampling": sampling(bias_ids=[-1], bias_values=[1])},
        {"sampling": sampling(bias_ids=[1], bias_values=[float("nan")])},
    ],
    ids=repr,
)
def test_request_data_that_cannot_be_used_fails_its_sequence_only(runner: Runner, bad: dict) -> None:
    broken = admission(**({"slot": 0, "tokens": [1, 2], "blocks": [1]} | bad))
    neighbour = admission(1, [1, 2], [2])
    result = runner.execute(1, plan(admissions=[broken, neighbour], extents=[(0, 0, 2, SAMPLE), (1, 0, 2, SAMPLE)]))
    assert list(result.statuses) == [plan_pb2.ROW_STATUS_FAILED, 0]
    assert list(result.token_counts) == [0, 1]


def test_extreme_parameters_are_taken(runner: Runner) -> None:
    extreme = sampling(top_k=2**32 - 1, min_tokens=2**32 - 1, temperature=1)
    result = runner.execute(
        1,
        plan(
            admissions=[admission(0, [1], [1], seed=2**64 - 1, sample_index=2**32 - 1, sampling=extreme)],
            extents=[(0, 0, 1, SAMPLE)],
        ),
    )
    assert list(result.statuses) == [0]


def test_snapshot_holds_all_that_a_scheduler_needs(runner: Runner) -> None:
    runner.execute(
        1,
        plan(
            admissions=[
                admission(2, [1, 2, 3, 4, 5], [7, 8], sequence_id=77, prompt_len=4, context=b"mine"),
                admission(0, [9] * 9, [1, 2, 3], num_computed=4),
            ],
            extents=[(2, 0, 5, SAMPLE), (0, 4, 2, 0)],
        ),
    )
    runner.execute(2, plan(appends=[(2, 2, 9), (2, 3, 11)]))
    snapshot = runner.snapshot()
    assert snapshot.last_plan == 2
    first, second = snapshot.sequences
    assert (first.slot, first.computed, ints(first.blocks)) == (0, 6, [1, 2, 3])
    assert (second.slot, second.sequence_id, second.prompt_len, second.context) == (2, 77, 4, b"mine")
    assert ints(second.tokens) == [1, 2, 3, 4, 5, 10]
    assert second.computed == 5
    assert ints(second.blocks) == [7, 8, 9, 11]


def test_resume_keeps_the_sequences_and_restarts_plan_numbers(runner: Runner, backend: SpyBackend) -> None:
    runner.execute(1, plan(admissions=[admission(0, [1, 2], [1])], extents=[(0, 0, 2, SAMPLE)]))
    runner.resume()
    assert runner.snapshot().last_plan == 0
    runner.execute(1, plan(extents=[(0, 2, 1, SAMPLE)]))
    assert backend.batches[-1].tokens.tolist() == [10]


def test_reset_releases_everything(runner: Runner, backend: SpyBackend) -> None:
    runner.execute(1, plan(admissions=[admission(0, [1] * 8, [1, 2])], extents=[(0, 0, 8, SAMPLE)]))
    runner.reset()
    assert not runner.snapshot().sequences
    runner.execute(1, plan(admissions=[admission(0, [3], [3]), admission(1, [4] * 8, [4, 5])]))
    runner.execute(2, plan(extents=[(0, 0, 1, SAMPLE), (1, 0, 8, 0)]))
    assert backend.batches[-1].block_tables.tolist() == [[3, 0], [4, 5]]


def test_an_error_in_the_backend_is_a_fault_that_only_a_new_session_ends(runner: Runner, backend: SpyBackend) -> None:
    def explode(batch: object) -> None:
        raise RuntimeError("out of memory")

    backend.on_step = explode
    begin = plan(admissions=[admission(0, [1], [1])], extents=[(0, 0, 1, SAMPLE)])
    with pytest.raises(PlanFault, match="plan 1 failed in the backend: RuntimeError: out of memory"):
        runner.execute(1, begin)
    backend.on_step = lambda batch: None
    with pytest.raises(PlanFault, match="no plan executes until a new session begins"):
        runner.execute(2, plan())
    with pytest.raises(PlanFault, match="can't be kept after a fault"):
        runner.resume()
    runner.reset()
    assert ints(runner.execute(1, begin).tokens) == [10]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_plans_must_come_in_order(runner: Runner, number: int) -> None:
    runner.execute(1, plan())
    with pytest.raises(PlanFault, match=f"plan {number} can't follow plan 1"):
        runner.execute(number, plan())


def test_timings_cover_the_step() -> None:
    runner = Runner(HashBackend(step_ms=20))
    runner.execute(1, plan(admissions=[admission(0, [1], [1])], extents=[(0, 0, 1, SAMPLE)]))
    timings = runner.execute(2, plan(extents=[(0, 1, 1, SAMPLE)])).timings
    assert timings.prepare_ns > 0
    assert timings.forward_ns > 0
    assert timings.idle_ns > 0


def test_large_buffers_use_memory_only_where_they_are_used() -> None:
    """The token buffer alone has 134 MB of address space."""
    assert int(in_own_process("bytes_of_a_large_roster()", __name__)) < 32 << 20


def bytes_of_a_large_roster() -> int:
    """Returns the resident bytes that a runner with many large slots adds to a process."""
    import psutil

    big = SpyBackend()
    big.num_slots, big.num_blocks = 256, 256
    big.model.context_length = 131072
    before = psutil.Process().memory_info().rss
    runner = Runner(big)
    runner.execute(1, plan(admissions=[admission(255, [1], [1])], extents=[(255, 0, 1, SAMPLE)]))
    return int(psutil.Process().memory_info().rss - before)
