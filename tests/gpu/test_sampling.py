"""The sampling kernels against the CPU's sampler: the same tokens from the same logits, parameters and history."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from runner_svc.sample_records import pack_rows
from runner_svc.sampler import SampledRows
from tests.support.sampler_rows import sample, step_batch
from tests.support.sampler_twin import Row, scores

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.sampling import CudaSampler  # imports CuPy

CONTEXT = 640


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def cuda_sample(rows: list[Row], dtype: torch.dtype = torch.float32) -> tuple[SampledRows, torch.Tensor]:
    """What the kernels make of the rows, and the token buffer afterwards; the logits lie between NaNs."""
    batch = step_batch(rows)
    packed = pack_rows(batch, np.arange(len(rows)))
    buffer = torch.full((len(rows) + 1, CONTEXT), -9, dtype=torch.int32)
    for slot, row in enumerate(rows):
        buffer[slot, : len(row.tokens)] = torch.tensor(row.tokens)
    buffer = buffer.cuda()
    vocab_size = len(rows[0].logits)
    guarded = torch.full(((len(rows) + 2) * vocab_size,), torch.nan, dtype=dtype, device="cuda")
    logits = guarded[vocab_size:-vocab_size].view(-1, vocab_size)
    logits.copy_(torch.tensor([row.logits for row in rows], dtype=torch.float32))
    tokens = torch.full((len(rows),), -7, dtype=torch.int32, device="cuda")
    finite = torch.full((len(rows),), 7, dtype=torch.uint8, device="cuda")
    sampler = CudaSampler(vocab_size, dtype, buffer)
    sampler(
        torch.cuda.current_stream().cuda_stream,
        logits,
        torch.from_numpy(packed.records.view(np.uint8)).cuda(),
        torch.from_numpy(packed.extra_ids).cuda(),
        torch.from_numpy(packed.extra_values).cuda(),
        tokens,
        finite,
        adjusted=packed.adjusted,
    )
    assert not sampler._scratch.any()
    assert bool(finite.le(1).all())
    return SampledRows(tokens.cpu().numpy(), finite.cpu().numpy().astype(bool), []), buffer


def random_logits(dice: random.Random, vocab_size: int) -> list[float]:
    noise = np.random.default_rng(dice.getrandbits(32))
    kind = dice.choice(["gauss", "gauss", "gauss", "grid", "equal", "outlier", "low"])
    values = noise.normal(dice.choice([0, 0, -40, 30]), dice.choice([0.01, 0.2, 1, 3, 8]), vocab_size)
    if kind == "grid":
        values = values.round(1)
    if kind == "equal":
        values[:] = 1.5
    if kind == "outlier":
        values[dice.randrange(vocab_size)] += dice.choice([5, 12, 60])
    if kind == "low":  # a few far above all others
        chosen = noise.permutation(vocab_size)[:20]
        values[chosen] += 50
    return values.astype(np.float32).tolist()


def random_row(dice: random.Random, vocab_size: int) -> Row:
    """Any combination of parameters. Prefixes of one to three ids show whether they end at the right one."""
    prompt_len = dice.randint(1, 300)
    return Row(
        logits=random_logits(dice, vocab_size),
        tokens=[dice.randrange(vocab_size) for _ in range(prompt_len + dice.randint(0, 300))],
        prompt_len=prompt_len,
        seed=dice.getrandbits(64),
        sample_index=dice.randrange(4),
        temperature=dice.choice([0.0, 0.05, 0.7, 1.0, 1.0, 5.0]),
        top_k=dice.choice([0, 0, 1, 2, 3, 50, 3000, vocab_size // 2, vocab_size * 2]),
        top_p=dice.choice([1.0, 1.0, 0.5, 0.9, 0.999, 1.5 / vocab_size, 2.5 / vocab_size]),
        min_p=dice.choice([0.0, 0.0, 0.1, 0.9]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=dice.choice([0.0, 0.0, 0.5, -1.0]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.25, -0.5]),
        min_tokens=dice.choice([0, 0, 400]),
        bias={dice.randrange(vocab_size): dice.uniform(-100, 10) for _ in range(dice.choice([0, 0, 40]))},
        stop_ids=[dice.randrange(vocab_size) for _ in range(dice.choice([0, 2]))],
    )


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
    """More equal logits than are sorted in shared memory: the prefix is bisected."""
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
