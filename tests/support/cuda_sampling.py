"""Runs rows through the sampling kernels, and makes rows with random parameters. Needs a GPU: imports CuPy."""

from __future__ import annotations

import random

import numpy as np
import torch
from numpy.typing import NDArray

from runner_svc.cuda.sampling import CudaSampler
from runner_svc.sampling.sample_records import pack_rows
from runner_svc.sampling.sampler import SampledRows
from tests.support.sampler_rows import step_batch
from tests.support.sampler_twin import Row

CONTEXT = 640


def cuda_sample(
    rows: list[Row], dtype: torch.dtype = torch.float32, masks: NDArray[np.uint32] | None = None
) -> tuple[SampledRows, torch.Tensor]:
    """Returns the kernels' samples of the rows, and the token buffer afterwards; the logits lie between NaNs.

    `masks` [L, ceil(vocab_size / 32)]: see `CudaSampler`.
    """
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
        masks=torch.from_numpy(masks.view(np.int32)).cuda() if masks is not None else None,
    )
    assert bool(guarded[:vocab_size].isnan().all() and guarded[-vocab_size:].isnan().all())
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
    if kind == "low":  # a few tokens far above all others
        chosen = noise.permutation(vocab_size)[:20]
        values[chosen] += 50
    return values.astype(np.float32).tolist()


def random_row(dice: random.Random, vocab_size: int) -> Row:
    """Returns a row with random parameters. Prefixes of one to three ids show whether top-p ends at the right one."""
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
