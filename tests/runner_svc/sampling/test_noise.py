"""The draw keys: arrays and scalars agree, and all three parts matter."""

from __future__ import annotations

import numpy as np

from runner_svc.sampling.noise import draw_key, draw_keys


def test_arrays_and_plain_integers_agree() -> None:
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    dice = np.random.default_rng(seed)
    seeds = dice.integers(0, 2**64, 500, np.uint64)
    samples = dice.integers(0, 2**32, 500, np.uint32)
    positions = dice.integers(0, 2**31, 500, np.int32)
    seeds[:2] = 0, 2**64 - 1
    expected = [draw_key(*map(int, row)) for row in zip(seeds, samples, positions, strict=True)]
    assert draw_keys(seeds, samples, positions).tolist() == expected


def test_neighbouring_seeds_samples_and_positions_have_distinct_keys() -> None:
    keys = {draw_key(seed, sample, position) for seed in range(20) for sample in range(20) for position in range(20)}
    assert len(keys) == 8000
