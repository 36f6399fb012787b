"""Sampled frequencies against exact probabilities: chi-square over seeds, and over the positions of one seed."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from runner_svc.sampling.sampler import Sampler
from tests.support.sampler_rows import sample, step_batch
from tests.support.sampler_twin import Row, probabilities

DRAWS = 1500
LOGITS = [2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0]
# Probability that a correct sampler fails: about one in a million per test.
SIGMAS = 5.0

CASES = {
    "plain": Row(LOGITS, [0], 1),
    "cold": Row(LOGITS, [0], 1, temperature=0.5),
    "hot": Row(LOGITS, [0], 1, temperature=2.0),
    "top_k": Row(LOGITS, [0], 1, top_k=4),
    "top_p": Row(LOGITS, [0], 1, top_p=0.7),
    "min_p": Row(LOGITS, [0], 1, min_p=0.2),
    "all": Row(LOGITS, [0, 3, 1], 2, temperature=1.5, top_k=8, top_p=0.95, min_p=0.05, repetition_penalty=1.2),
    "bias": Row(LOGITS, [0, 1, 1], 1, bias={9: 5.0, 0: -100.0}, frequency_penalty=0.5, presence_penalty=0.25),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def assert_drawn_as(counts: np.ndarray, expected: dict[int, float]) -> None:
    """Tests by Wilson-Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal."""
    drawn = int(counts.sum())
    outside = [token for token in range(len(counts)) if counts[token] and token not in expected]
    assert not outside, f"tokens {outside} can't be drawn"
    tokens = [token for token, probability in expected.items() if probability * drawn >= 5]
    rare = drawn - sum(counts[token] for token in tokens)
    cells = [(counts[token], expected[token] * drawn) for token in tokens]
    rest = drawn - sum(mean for _, mean in cells)
    if rest >= 5:
        cells.append((rare, rest))
    freedom = len(cells) - 1
    if freedom == 0:
        return
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    variance = 2 / (9 * freedom)
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - variance)) / variance**0.5
    assert deviation < SIGMAS, (chi_square, freedom, cells)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_over_seeds(name: str) -> None:
    first = random.getrandbits(60)
    print(f"first seed {first}")
    rows = [dataclasses.replace(CASES[name], seed=first + draw) for draw in range(DRAWS)]
    counts = np.bincount(sample(rows).tokens, minlength=len(LOGITS))
    assert_drawn_as(counts, probabilities(CASES[name]))


@pytest.mark.parametrize("axis", ["position", "sample_index"])
def test_frequencies_and_independence_along_one_seed(axis: str) -> None:
    """Draws of one sequence at consecutive positions, and draws of the choices of one request."""
    seed = random.getrandbits(64)
    print(f"seed {seed}")
    row = Row(LOGITS, [0], 1, seed=seed)
    batch = step_batch([row] * DRAWS)
    if axis == "position":
        batch.starts[:] = np.arange(DRAWS)
    else:
        batch.params["sample_index"] = np.arange(DRAWS)
    logits = torch.tensor([LOGITS] * DRAWS)
    tokens = Sampler(len(LOGITS)).sample(logits, batch, np.arange(DRAWS)).tokens
    expected = probabilities(row)
    assert_drawn_as(np.bincount(tokens, minlength=len(LOGITS)), expected)
    pairs = tokens[:-1:2] * len(LOGITS) + tokens[1::2]
    joint = {a * len(LOGITS) + b: expected[a] * expected[b] for a in expected for b in expected}
    assert_drawn_as(np.bincount(pairs, minlength=len(LOGITS) ** 2), joint)


def test_frequencies_over_a_large_vocabulary() -> None:
    """49,152 equal logits: the noise is also independent across the ids of the vocabulary."""
    seed = random.getrandbits(60)
    print(f"first seed {seed}")
    vocab_size, draws, bins = 49_152, 600, 32
    sampler = Sampler(vocab_size)
    batch = step_batch([Row([0.0], [0], 1)] * draws)
    batch.params["seed"] = seed + np.arange(draws)
    tokens = []
    for chunk in np.split(np.arange(draws), 6):
        tokens.append(sampler.sample(torch.zeros(len(chunk), vocab_size), batch, chunk).tokens)
    drawn = np.concatenate(tokens)
    for bits in (drawn // (vocab_size // bins), drawn % bins):
        assert_drawn_as(np.bincount(bits, minlength=bins), dict.fromkeys(range(bins), 1 / bins))
