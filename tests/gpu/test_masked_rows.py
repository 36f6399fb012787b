"""Rows that wait for masks on a GPU: their draws, against the CPU's sampler on the same logits, and which rows wait."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.batch.batch_state import BatchState
from runner_svc.execution.runner import Runner
from tests.support.late_rows import LateRows, differences, distributions
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling
from tests.support.sampler_rows import pack_masks, sample
from tests.support.sampler_twin import Row, scores
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.gpu_backends import BLOCK_SIZE, FAMILIES, NUM_SLOTS, load  # imports CuPy

ASKED: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
)
# Allowed difference of log-probabilities between batches of different shapes, as a share of their standard deviation.
ERROR = 0.15


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def make(tmp_path: Path, rng: random.Random) -> Callable[[], Runner]:
    folder = make_tiny_model("llama", tmp_path / "tiny", rng.randrange(1000), torch.bfloat16, **FAMILIES["llama"])
    runner = Runner(load(folder))

    def fresh() -> Runner:
        runner.reset()
        return runner

    return fresh


def random_rows(rng: random.Random) -> list[Row]:
    """Returns a prompt for each slot, without logits yet."""
    rows = []
    for slot in range(NUM_SLOTS):
        prompt = [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 8))]
        rows.append(Row([], prompt, len(prompt), seed=rng.getrandbits(60), **ASKED[slot % len(ASKED)]))
    return rows


def random_ids(rng: random.Random) -> list[int]:
    return rng.sample(range(NUM_TOKENS), rng.choice([1, 3, NUM_TOKENS // 2, NUM_TOKENS]))


def opening(rows: Sequence[Row], flags: Sequence[int], logprobs: int | None = None) -> plan_pb2.Plan:
    asked = {} if logprobs is None else {"logprobs": logprobs}
    return plan(
        admissions=[
            admission(
                slot,
                row.tokens,
                [1 + 4 * slot + i for i in range(4)],
                seed=row.seed,
                prompt_len=row.prompt_len,
                sampling=sampling(temperature=row.temperature, top_p=row.top_p, top_k=row.top_k, **asked),
            )
            for slot, row in enumerate(rows)
        ],
        extents=[(slot, 0, len(row.tokens), flag) for slot, (row, flag) in enumerate(zip(rows, flags, strict=True))],
    )


def decoding(lengths: Mapping[int, int], flags: Mapping[int, int]) -> plan_pb2.Plan:
    """Returns a decode step of the slots in `flags`; `lengths` are the tokens of their sequences."""
    return plan(extents=[(slot, lengths[slot] - 1, 1, flag) for slot, flag in flags.items()])


def tokens_of(runner: Runner) -> dict[int, list[int]]:
    """Returns the tokens by slot."""
    return {entry.slot: ints(entry.tokens) for entry in runner.snapshot().sequences}


def test_rows_draw_what_the_cpus_sampler_draws_under_their_masks(
    make: Callable[[], Runner], rng: random.Random
) -> None:
    rows = random_rows(rng)
    free = make().execute(1, opening(rows, [SAMPLE] * NUM_SLOTS, NUM_TOKENS))
    rows = [replace(row, logits=line.tolist()) for row, line in zip(rows, distributions(free), strict=True)]
    flags = [rng.choice([AWAIT, SAMPLE]) for _ in rows[:-2]] + [AWAIT, SAMPLE]
    ids = {slot: random_ids(rng) for slot, flag in enumerate(flags) if flag == AWAIT}
    result = make().execute(1, opening(rows, flags, logprobs=2), masks(NUM_TOKENS, ids))
    assert (result.statuses, result.token_counts) == (bytes(NUM_SLOTS), b"\1" * NUM_SLOTS)
    tokens = ints(result.tokens)
    allowed = np.zeros((NUM_SLOTS, NUM_TOKENS), np.bool_)
    for slot in range(NUM_SLOTS):
        allowed[slot, ids.get(slot, range(NUM_TOKENS))] = True
    unmasked = [slot for slot in range(NUM_SLOTS) if slot not in ids]
    assert [tokens[slot] for slot in unmasked] == [ints(free.tokens)[slot] for slot in unmasked]
    wanted = sample(rows, masks=pack_masks(allowed)).tokens.tolist()
    for slot in ids:
        assert allowed[slot, tokens[slot]]
        masked = np.where(allowed[slot], rows[slot].logits, -np.inf)
        if tokens[slot] != wanted[slot]:
            twin = scores(replace(rows[slot], logits=masked.tolist()))
            assert math.isclose(twin.get(tokens[slot], -math.inf), twin[wanted[slot]], abs_tol=1e-3), ASKED[slot % 4]
        reported = np.frombuffer(next(entry for entry in result.logprobs if entry.row == slot).values, "<f4")[0]
        assert math.isclose(reported, float(torch.tensor(masked).log_softmax(0)[tokens[slot]]), abs_tol=1e-3)


def test_later_plans_do_not_wait(make: Callable[[], Runner], rng: random.Random) -> None:
    rows = random_rows(rng)
    flags = [AWAIT if slot % 3 == 0 else SAMPLE for slot in range(NUM_SLOTS)]
    constrained = [slot for slot, flag in enumerate(flags) if flag == AWAIT]
    others = [slot for slot, flag in enumerate(flags) if flag == SAMPLE]
    first_ids, third_ids = ({slot: random_ids(rng) for slot in constrained} for _ in range(2))
    lengths = {slot: len(row.tokens) + 1 for slot, row in enumerate(rows)}
    longer = {slot: lengths[slot] + (slot in others) for slot in lengths}
    begin = opening(rows, flags)
    second = decoding(lengths, dict.fromkeys(others, SAMPLE))
    third = decoding(longer, dict(enumerate(flags)))
    # Rows are in the order of the extents: all slots in order.
    one_by_one = make()
    expected = [
        one_by_one.execute(1, begin, masks(NUM_TOKENS, first_ids)),
        one_by_one.execute(2, second),
        one_by_one.execute(3, third, masks(NUM_TOKENS, third_ids)),
    ]
    expected_sequences = tokens_of(one_by_one)
    runner = make()
    held = runner.launch(1, begin)
    ahead = runner.launch(2, second)
    torch.cuda.synchronize()
    assert ahead.done() and not held.done() and held.awaits_masks
    held.mask(masks(NUM_TOKENS, first_ids))
    results = [held.wait(), ahead.wait()]
    launched = runner.launch(3, third)
    launched.mask(masks(NUM_TOKENS, third_ids))
    results.append(launched.wait())
    assert [ints(result.tokens) for result in results] == [ints(result.tokens) for result in expected]
    resident = tokens_of(runner)
    assert resident == expected_sequences
    for slot in constrained:
        assert resident[slot][-2] in first_ids[slot] and resident[slot][-1] in third_ids[slot]


def test_a_step_sees_the_token_that_was_drawn_late(make: Callable[[], Runner], rng: random.Random) -> None:
    """It gives the same as a prompt that ends with that token."""
    prompts = random_rows(rng)
    drawn = [rng.randrange(NUM_TOKENS) for _ in prompts]
    wholes = [
        replace(row, tokens=[*row.tokens, token], prompt_len=row.prompt_len + 1)
        for row, token in zip(prompts, drawn, strict=True)
    ]
    expected = distributions(make().execute(1, opening(wholes, [SAMPLE] * NUM_SLOTS, NUM_TOKENS)))
    runner = make()
    only = {slot: [token] for slot, token in enumerate(drawn)}
    runner.execute(1, opening(prompts, [AWAIT] * NUM_SLOTS, NUM_TOKENS), masks(NUM_TOKENS, only))
    lengths = {slot: len(row.tokens) for slot, row in enumerate(wholes)}
    actual = distributions(runner.execute(2, decoding(lengths, dict.fromkeys(lengths, SAMPLE))))
    errors = np.sqrt(np.square(actual - expected).mean(axis=1)) / expected.std(axis=1)
    print(f"errors {errors} sigma")
    assert errors.max() < ERROR


def test_a_row_that_has_nothing_to_draw_fails_alone(make: Callable[[], Runner], rng: random.Random) -> None:
    rows = [replace(row, temperature=0.0) for row in random_rows(rng)]
    runner = make()
    expected = ints(runner.execute(1, opening(rows, [SAMPLE] * NUM_SLOTS)).tokens)
    ids = {slot: range(NUM_TOKENS) for slot in range(NUM_SLOTS)} | {4: []}
    result = make().execute(1, opening(rows, [AWAIT] * NUM_SLOTS), masks(NUM_TOKENS, ids))
    bad = plan_pb2.ROW_STATUS_NOT_FINITE
    assert list(result.statuses) == [bad if slot == 4 else 0 for slot in range(NUM_SLOTS)]
    assert ints(result.tokens) == [token for slot, token in enumerate(expected) if slot != 4]


def test_a_plan_that_is_abandoned_leaves_its_other_rows_as_they_are(
    make: Callable[[], Runner], rng: random.Random
) -> None:
    rows = random_rows(rng)
    runner = make()
    expected = ints(runner.execute(1, opening(rows, [SAMPLE] * NUM_SLOTS)).tokens)
    runner = make()
    runner.launch(1, opening(rows, [AWAIT, *[SAMPLE] * (NUM_SLOTS - 1)])).abandon()
    resident = tokens_of(runner)
    assert resident[0] == rows[0].tokens
    assert [resident[slot][-1] for slot in range(1, NUM_SLOTS)] == expected[1:]
    assert len(rows[0].tokens) < BLOCK_SIZE


@pytest.mark.parametrize("checked", [True, False])
def test_a_token_that_is_drawn_late_is_not_in_the_prompt_of_the_slots_next_sequence(
    tmp_path: Path, rng: random.Random, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check before the draw is launched, the token is in the prompt of each slot's next sequence."""
    if not checked:
        monkeypatch.setattr(BatchState, "outlived", lambda self, applied, rows: np.zeros(len(rows), np.bool_))
    rows = late_rows(tmp_path, rng)
    expected = rows.undisturbed()
    errors = differences(rows.disturbed(), expected)
    print(f"errors {errors} sigma")
    assert rows.foreign_tokens() == (0 if checked else NUM_SLOTS)
    assert errors.max() < ERROR if checked else errors.max() > ERROR


def test_penalties_of_rows_that_have_left_count_what_their_sequences_had(tmp_path: Path, rng: random.Random) -> None:
    rows = late_rows(tmp_path, rng)
    errors = differences(rows.penalised(leaves=True), rows.penalised(leaves=False))
    print(f"errors {errors} sigma")
    assert errors.max() < 0.01


def late_rows(folder: Path, rng: random.Random) -> LateRows:
    made = make_tiny_model("llama", folder / "tiny", rng.randrange(1000), torch.bfloat16, **FAMILIES["llama"])
    return LateRows(load(made), rng, torch.cuda.synchronize)
