"""The sampling kernels with masks, the ids that a constrained row may draw, against the CPU's sampler."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.sampler_rows import pack_masks, sample
from tests.support.sampler_twin import Row, scores

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.cuda_sampling import cuda_sample, random_logits, random_row  # imports CuPy


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def random_allowed(dice: random.Random, vocab_size: int) -> NDArray[np.bool_]:
    """Returns [V]: ids that a grammar may allow, from a single one to all, as for a row without a constraint."""
    count = dice.choice([1, 2, 5, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size])
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[np.random.default_rng(dice.getrandbits(32)).permutation(vocab_size)[:count]] = True
    return allowed


def masked(row: Row, allowed: NDArray[np.bool_]) -> Row:
    """Returns the row with logits of -inf for ids that the mask excludes."""
    logits = np.where(allowed, np.array(row.logits, np.float32), -np.inf)
    return replace(row, logits=logits.tolist())


def described(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__ if name not in ("logits", "tokens")}


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(37, 200), (1000, 200), (50_257, 60), (151_936, 40)])
def test_random_rows_draw_the_cpu_samplers_tokens(dice: random.Random, vocab_size: int, num_rows: int) -> None:
    rows = [random_row(dice, vocab_size) for _ in range(num_rows)]
    allowed = np.stack([random_allowed(dice, vocab_size) for _ in rows])
    expected = sample(rows, masks=pack_masks(allowed))
    result, buffer = cuda_sample(rows, masks=pack_masks(allowed, beyond=True))
    np.testing.assert_array_equal(result.finite, expected.finite)
    assert result.finite.mean() > 0.8  # the stop ids of few rows are all that their mask allows
    close = 0
    for index, (row, token) in enumerate(zip(rows, result.tokens.tolist(), strict=True)):
        drawn = [token] if result.finite[index] else []
        assert buffer[index, : len(row.tokens) + 1 + len(drawn)].tolist() == [*row.tokens, *drawn, -9]
        if not drawn:
            assert token == -1
            continue
        assert allowed[index, token], described(row)
        wanted = int(expected.tokens[index])
        if token != wanted:
            close += 1
            twin = scores(masked(row, allowed[index]))
            assert math.isclose(twin.get(token, -math.inf), twin.get(wanted, -math.inf), abs_tol=1e-4), described(row)
    assert close <= 2, f"{close} of {num_rows} rows differ"


@pytest.mark.parametrize("vocab_size", [37, 1000, 50_257])
def test_masks_that_allow_everything_change_nothing(dice: random.Random, vocab_size: int) -> None:
    rows = [random_row(dice, vocab_size) for _ in range(100)]
    free = cuda_sample(rows)[0]
    everything = pack_masks(np.ones((len(rows), vocab_size), np.bool_))
    result = cuda_sample(rows, masks=everything)[0]
    np.testing.assert_array_equal(result.tokens, free.tokens)
    np.testing.assert_array_equal(result.finite, free.finite)


@pytest.mark.parametrize("vocab_size", [37, 1000, 50_257])
def test_the_only_id_that_is_allowed_is_drawn(dice: random.Random, vocab_size: int) -> None:
    """It is drawn with any parameters and any probability."""
    rows, only = [], []
    for id_ in (0, 31, 32, vocab_size - 1):
        for asked in (
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.3, "top_p": 0.9},
            {"temperature": 2.0, "top_k": 4},
            {"temperature": 1.0, "min_p": 0.5},
            {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 9, "stop_ids": [1, 2]},
        ):
            row = Row(random_logits(dice, vocab_size), [3, 4, 5], 3, seed=dice.getrandbits(64), **asked)
            row.logits[id_] = dice.choice([row.logits[id_], -1e4, -1e30])
            rows.append(row)
            only.append(id_)
    allowed = np.zeros((len(rows), vocab_size), np.bool_)
    allowed[np.arange(len(rows)), only] = True
    result, buffer = cuda_sample(rows, masks=pack_masks(allowed, beyond=True))
    assert result.finite.all()
    assert result.tokens.tolist() == only
    assert buffer[: len(rows), 3].tolist() == only


def test_rows_that_are_not_finite_or_have_nothing_to_draw_leave_their_neighbours_alone(dice: random.Random) -> None:
    """NaN and infinities indicate a broken forward pass, even if the mask excludes their id."""
    vocab_size = 1000
    rows = [replace(random_row(dice, vocab_size), min_tokens=0) for _ in range(20)]
    allowed = np.stack([random_allowed(dice, vocab_size) for _ in rows])
    good = cuda_sample(rows, masks=pack_masks(allowed))[0].tokens.tolist()
    broken = {2: math.nan, 5: math.inf, 8: -math.inf, 11: math.nan, 14: math.inf, 17: -math.inf}
    for index, bad in broken.items():
        wanted = index % 2 == 0  # half of them at an id that is allowed
        allowed[index, 7:9] = True, False
        rows[index].logits[7 if wanted else 8] = bad
    allowed[19] = False
    result, buffer = cuda_sample(rows, masks=pack_masks(allowed, beyond=True))
    bad_rows = [*broken, 19]
    assert np.flatnonzero(~result.finite).tolist() == bad_rows
    for index, row in enumerate(rows):
        assert result.tokens[index] == (-1 if index in bad_rows else good[index])
        assert buffer[index, len(row.tokens)] == (-9 if index in bad_rows else good[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(dice: random.Random, dtype: torch.dtype) -> None:
    rows = []
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9)) * 6:
        row = Row(random_logits(dice, 32_000), [1, 2], 2, seed=dice.getrandbits(64), temperature=temperature)
        row.top_p = top_p
        row.logits = torch.tensor(row.logits).to(dtype).float().tolist()
        rows.append(row)
    masks = pack_masks(np.stack([random_allowed(dice, 32_000) for _ in rows]))
    assert cuda_sample(rows, dtype, masks)[0].tokens.tolist() == sample(rows, masks=masks).tokens.tolist()
