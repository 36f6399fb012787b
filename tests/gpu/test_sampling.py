"""The sampling kernels against the CPU's sampler: the same tokens from the same logits, parameters and history."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tests.support.sampler_rows import sample
from tests.support.sampler_twin import Row, scores

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.cuda_sampling import cuda_sample, random_logits, random_row  # imports CuPy


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(37, 200), (1000, 200), (50_257, 80), (151_936, 80)])
def test_random_rows_draw_the_cpu_samplers_tokens(dice: random.Random, vocab_size: int, num_rows: int) -> None:
    rows = [random_row(dice, vocab_size) for _ in range(num_rows)]
    expected = sample(rows)
    result, buffer = cuda_sample(rows)
    np.testing.assert_array_equal(result.finite, expected.finite)
    assert result.finite.all()
    close = 0
    for row, token, wanted in zip(rows, result.tokens.tolist(), expected.tokens.tolist(), strict=True):
        if token != wanted:
            close += 1
            described = {
                name: getattr(row, name) for name in Row.__dataclass_fields__ if name not in ("logits", "tokens")
            }
            twin = scores(row)
            assert math.isclose(twin.get(token, -math.inf), twin.get(wanted, -math.inf), abs_tol=1e-4), described
    assert close <= 2, f"{close} of {num_rows} rows differ"
    for slot, (row, token) in enumerate(zip(rows, result.tokens.tolist(), strict=True)):
        assert buffer[slot, : len(row.tokens) + 2].tolist() == [*row.tokens, token, -9]


def test_equal_logits_are_kept_by_rising_id(dice: random.Random) -> None:
    """There are more equal logits than are sorted in shared memory, so the prefix is bisected."""
    vocab_size = 60_000
    for top_k, top_p in [(1, 1.0), (2, 1.0), (0, 2.5 / vocab_size), (40_000, 1.5 / 40_000), (0, 0.5)]:
        rows = [Row([0.25] * vocab_size, [1], 1, seed=dice.getrandbits(64), top_k=top_k, top_p=top_p) for _ in range(8)]
        assert cuda_sample(rows)[0].tokens.tolist() == sample(rows).tokens.tolist(), (top_k, top_p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(dice: random.Random, dtype: torch.dtype) -> None:
    rows = []
    for temperature in (0.0, 1.0, 1.0, 0.7) * 4:
        row = Row(
            random_logits(dice, 32_000), [1, 2], 2, seed=dice.getrandbits(64), temperature=temperature,
            top_k=dice.choice([0, 3, 40]), top_p=dice.choice([1.0, 0.9]),
        )  # fmt: skip
        row.logits = torch.tensor(row.logits).to(dtype).float().tolist()
        rows.append(row)
    assert cuda_sample(rows, dtype)[0].tokens.tolist() == sample(rows).tokens.tolist()


def test_rows_that_are_not_finite_leave_their_neighbours_alone(dice: random.Random) -> None:
    vocab_size = 1000
    rows = [random_row(dice, vocab_size) for _ in range(20)]
    good = cuda_sample(rows)[0].tokens.tolist()
    for index, bad in ((3, math.nan), (7, math.inf), (11, -math.inf), (19, math.nan)):
        rows[index].logits[dice.randrange(vocab_size)] = bad
    result, buffer = cuda_sample(rows)
    assert np.flatnonzero(~result.finite).tolist() == [3, 7, 11, 19]
    for index in range(20):
        is_good = index not in (3, 7, 11, 19)
        assert result.tokens[index] == (good[index] if is_good else -1)
        assert buffer[index, len(rows[index].tokens)] == (good[index] if is_good else -9)


def test_a_row_with_every_token_forbidden_is_not_finite() -> None:
    row = Row([1.0] * 50, [1], 1, temperature=1.0, min_tokens=5, stop_ids=list(range(50)))
    open_row = Row([1.0] * 50, [1], 1, temperature=1.0, min_tokens=5, stop_ids=list(range(49)))
    result, _ = cuda_sample([row, open_row])
    assert result.finite.tolist() == [False, True]
    assert result.tokens.tolist() == [-1, 49]


def test_more_adjusted_rows_than_scratch_rows(dice: random.Random) -> None:
    rows = [random_row(dice, 500) for _ in range(150)]
    for row in rows:
        row.temperature, row.frequency_penalty, row.tokens = 0.0, 0.25, [dice.randrange(500) for _ in range(600)]
        row.prompt_len = dice.randint(1, 599)
    result, _ = cuda_sample(rows)
    differing = int((result.tokens != sample(rows).tokens).sum())
    assert differing <= 1
