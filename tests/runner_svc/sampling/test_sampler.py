"""The sampler compared with a slow reference, for single rows and among others."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from runner_svc.sampling import sampler as sampler_module
from runner_svc.sampling.sampler import Sampler
from tests.support.plans import ints
from tests.support.sampler_rows import sample, step_batch
from tests.support.sampler_twin import Row, adjusted, log_softmax, probabilities, scores

VOCAB_SIZE = 1000


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_row(dice: random.Random, vocab_size: int = VOCAB_SIZE) -> Row:
    """Returns a row with random parameters and with logits on a grid, so that equal ones occur."""
    prompt_len = dice.randint(1, 20)
    spread = dice.choice([1, 3, 8])
    return Row(
        logits=[round(dice.gauss(0, spread), dice.choice([1, 6])) for _ in range(vocab_size)],
        tokens=[dice.randrange(vocab_size) for _ in range(prompt_len + dice.randint(0, 20))],
        prompt_len=prompt_len,
        seed=dice.getrandbits(64),
        sample_index=dice.randrange(4),
        temperature=dice.choice([0.2, 0.7, 1.0, 1.0, 2.0]),
        top_k=dice.choice([0, 0, 1, 5, 50, vocab_size, vocab_size * 2]),
        top_p=dice.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
        min_p=dice.choice([0.0, 0.0, 0.1, 1.0]),
        repetition_penalty=dice.choice([1.0, 1.3, 0.8]),
        presence_penalty=dice.choice([0.0, 0.5, -1.0]),
        frequency_penalty=dice.choice([0.0, 0.25, -0.5]),
        min_tokens=dice.choice([0, 10]),
        bias={dice.randrange(vocab_size): dice.uniform(-100, 10) for _ in range(dice.choice([0, 3]))},
        stop_ids=[dice.randrange(vocab_size) for _ in range(dice.choice([0, 2]))],
    )


def test_random_rows_sample_the_tokens_of_the_reference(dice: random.Random) -> None:
    rows = [random_row(dice) for _ in range(300)]
    close = 0
    result = sample(rows)
    assert result.finite.all()
    for row, token in zip(rows, result.tokens.tolist(), strict=True):
        expected = scores(row)
        best = max(expected, key=expected.__getitem__)
        # float32 against float64: another token may win, or be kept, only if scores are nearly equal.
        if token != best:
            close += 1
            assert math.isclose(scores(row).get(token, -math.inf), expected[best], abs_tol=1e-4) or _at_edge(row), row
    assert close <= 3


def _at_edge(row: Row) -> bool:
    """Returns whether a slightly larger or smaller top_p or min_p keeps other tokens, or logits at top_k nearly tie."""
    logits = sorted(adjusted(row), reverse=True)
    if 0 < row.top_k < len(logits) and math.isclose(logits[row.top_k - 1], logits[row.top_k], abs_tol=1e-5):
        return True
    sets = []
    for factor in (1 - 1e-5, 1 + 1e-5):
        moved = dataclasses.replace(row, top_p=min(1.0, row.top_p * factor), min_p=row.min_p * factor)
        sets.append(set(probabilities(moved)))
    return sets[0] != sets[1]


def test_greedy_takes_the_first_of_the_largest_adjusted_logits(dice: random.Random) -> None:
    rows = [dataclasses.replace(random_row(dice), temperature=0) for _ in range(100)]
    for row, token in zip(rows, sample(rows).tokens.tolist(), strict=True):
        logits = np.array(adjusted(row), np.float32)
        assert logits[token] == pytest.approx(logits.max(), abs=1e-5), row
    plain = Row([0.0, 2.0, 1.0, 2.0], [0], 1, temperature=0)
    assert sample([plain]).tokens.tolist() == [1]


@pytest.mark.parametrize("vocab_size", [37, 49_152])
def test_a_rows_token_does_not_depend_on_other_rows(dice: random.Random, vocab_size: int) -> None:
    noise = np.random.default_rng(dice.getrandbits(32))
    rows = []
    for _ in range(12):
        row = random_row(dice, 30)
        row.logits = noise.normal(0, 3, vocab_size).tolist()
        row.temperature = dice.choice([0, 1.0])
        rows.append(row)
    alone = [int(sample([row]).tokens[0]) for row in rows]
    for _ in range(3):
        order = list(range(len(rows)))
        dice.shuffle(order)
        order = order[: dice.randint(2, len(order))]
        assert sample([rows[i] for i in order]).tokens.tolist() == [alone[i] for i in order]


def test_rows_computed_together_as_on_a_gpu_draw_the_same_tokens(
    dice: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [dataclasses.replace(random_row(dice), top_k=0, top_p=1.0) for _ in range(50)]
    one_by_one = sample(rows).tokens.tolist()
    monkeypatch.setattr(sampler_module, "_row_by_row", lambda device: False)
    assert sample(rows).tokens.tolist() == one_by_one


def test_truncation_takes_more_candidates_if_the_first_do_not_reach_top_p(
    dice: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [dataclasses.replace(random_row(dice), top_p=dice.choice([0.5, 0.99]), top_k=0) for _ in range(40)]
    usual = sample(rows).tokens.tolist()
    for candidates in (1, 7):
        monkeypatch.setattr(sampler_module, "_TOP_P_CANDIDATES", candidates)
        assert sample(rows).tokens.tolist() == usual


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_reported_and_others_sample_as_usual(bad: float, temperature: float) -> None:
    dice = random.Random(3)
    rows = [dataclasses.replace(random_row(dice), temperature=temperature, logprobs=0) for _ in range(3)]
    usual = sample(rows)
    rows[1].logits[17] = bad
    result = sample(rows)
    assert result.finite.tolist() == [True, False, True]
    assert result.tokens[[0, 2]].tolist() == usual.tokens[[0, 2]].tolist()
    assert [entry.row for entry in result.logprobs] == [0, 2]


def test_a_row_with_every_token_forbidden_is_not_finite() -> None:
    row = Row([1.0, 2.0], [0], 1, min_tokens=5, stop_ids=[0, 1])
    assert not sample([row]).finite[0]


def test_min_tokens_forbids_stop_ids_until_that_many_are_generated() -> None:
    def drawn(generated: int) -> int:
        row = Row([0.0, 9.0, 5.0], [0] * (3 + generated), 3, temperature=0, min_tokens=2, stop_ids=[1])
        return int(sample([row]).tokens[0])

    assert [drawn(generated) for generated in range(4)] == [2, 2, 1, 1]


def test_penalties_count_the_right_tokens() -> None:
    # Token 0 is in the prompt, 1 twice in the output, 2 nowhere, 3 is in the prompt with a negative logit.
    base = Row([4.0, 4.0, 4.0, -1.0], [0, 3, 1, 1], 2, temperature=0, logprobs=4)

    def logits(**changes: float) -> list[float]:
        (entry,) = sample([dataclasses.replace(base, **changes)]).logprobs
        by_id = dict(zip(ints(entry.top_ids), np.frombuffer(entry.top_values, "<f4").tolist(), strict=True))
        return [by_id[token] - by_id[2] + 4 for token in range(4)]

    assert logits() == pytest.approx([4, 4, 4, -1], abs=1e-5)
    assert logits(repetition_penalty=2.0) == pytest.approx([2, 2, 4, -2], abs=1e-5)
    assert logits(presence_penalty=0.5) == pytest.approx([4, 3.5, 4, -1], abs=1e-5)
    assert logits(frequency_penalty=0.5) == pytest.approx([4, 3, 4, -1], abs=1e-5)


def test_logprobs_follow_adjustments_but_not_temperature(dice: random.Random) -> None:
    rows = [dataclasses.replace(random_row(dice), logprobs=dice.choice([None, 0, 1, 20])) for _ in range(40)]
    result = sample(rows)
    asked = [i for i, row in enumerate(rows) if row.logprobs is not None]
    assert [entry.row for entry in result.logprobs] == asked
    for entry in result.logprobs:
        row, token = rows[entry.row], int(result.tokens[entry.row])
        expected = log_softmax(adjusted(row))
        assert entry.first_position == 0
        assert np.frombuffer(entry.values, "<f4").tolist() == pytest.approx([expected[token]], abs=1e-4)
        top_ids = ints(entry.top_ids)
        top_values = np.frombuffer(entry.top_values, "<f4").tolist()
        assert len(top_ids) == len(top_values) == entry.top == row.logprobs
        assert len(set(top_ids)) == len(top_ids)
        assert top_values == pytest.approx(sorted(expected, reverse=True)[: entry.top], abs=1e-4)
        assert top_values == pytest.approx([expected[i] for i in top_ids], abs=1e-4)


def test_prompt_logprobs_score_the_next_prompt_token_of_each_position() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 50, generator=generator)
    row = Row([0.0] * 50, [4, 8, 15, 16, 23, 42], 5, bias={8: 100.0})  # adjustments have no effect
    batch = step_batch([row])
    batch.starts[:], batch.counts[:] = 1, 5
    batch.states[0].prompt_logprobs = 2
    assert batch.num_scored(0) == 3  # positions 1 to 3 score tokens 2 to 4; token 5 is output
    entry = Sampler(50).prompt_logprobs(logits, batch, 0)
    assert (entry.row, entry.first_position, entry.top) == (0, 2, 2)
    expected = [log_softmax(line) for line in logits.double().tolist()]
    values = [line[token] for line, token in zip(expected, [15, 16, 23], strict=True)]
    assert np.frombuffer(entry.values, "<f4").tolist() == pytest.approx(values, abs=1e-5)
    tops = [sorted(range(50), key=lambda token, line=line: -line[token])[:2] for line in expected]
    assert ints(entry.top_ids) == [token for top in tops for token in top]


def test_no_rows_are_no_work() -> None:
    result = Sampler(10).sample(torch.empty(0, 10), step_batch([Row([0.0], [0], 1)]), np.empty(0, np.intp))
    assert (len(result.tokens), len(result.finite), result.logprobs) == (0, 0, [])
