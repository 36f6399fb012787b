"""The n-gram drafter proposes what followed the latest of the longest matches, and reads only known tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runner_svc.drafting.ngram import NgramDrafter


def proposed(text: list[int], most: int, longest: int = 8, window: int = 8192) -> list[int]:
    tokens = np.full((1, len(text) + 9), 7, np.int32)
    tokens[0, : len(text)] = text
    counters, each = np.array([len(text)], np.int32), np.array([most], np.int32)
    made = NgramDrafter(longest, window).propose(tokens, np.zeros(1, np.int32), counters, each)
    assert made.shape == (1, most) and made.dtype == np.int32
    return [token for token in made[0].tolist() if token >= 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 1], [2, 3, 1, 2]),  # what followed reaches the end, and repeats itself
        ([5, 5], [5, 5, 5, 5]),
        ([1, 2, 8, 9, 3, 2, 4, 6, 1, 2], [8, 9, 3, 2]),  # the longer match, though an older one
        ([1, 2, 8, 9, 1, 2, 4, 6, 0, 1, 2], [4, 6, 0, 1]),  # the latest of equally long ones
    ],
)
def test_examples(text: list[int], expected: list[int]) -> None:
    assert proposed(text, 4) == expected


def slow(text: list[int], most: int, longest: int, window: int) -> list[int]:
    """The definition."""
    text = text[-window:]
    for length in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                made = list(text)
                for _ in range(most):
                    made.append(made[end + len(made) - len(text)])
                return made[len(text) :]
    return []


def test_random_texts_agree_with_the_definition() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        text = [rng.randrange(rng.choice([2, 5, 30])) for _ in range(rng.randint(1, 60))]
        case = text, rng.randint(1, 7), rng.randint(1, 9), rng.choice([3, 20, 8192])
        assert proposed(*case) == slow(*case), case


def test_rows_are_independent_and_nothing_behind_a_counter_is_read() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 4, (6, 40), np.int32)
    slots, counters = np.array([4, 0, 2], np.int32), np.array([30, 1, 12], np.int32)
    most = np.array([0, 5, 3], np.int32)
    made = NgramDrafter().propose(tokens, slots, counters, most)
    for slot, known in zip(slots, counters, strict=True):
        tokens[slot, known:] = rng.integers(0, 4, 40 - known)
    np.testing.assert_array_equal(NgramDrafter().propose(tokens, slots, counters, most), made)
    assert made.shape == (3, 5) and (made[0] == -1).all() and (made[2, 3:] == -1).all()
    assert made[2, :3].tolist() == proposed(tokens[2, :12].tolist(), 3)
