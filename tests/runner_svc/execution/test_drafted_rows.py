"""Rows with drafts give each sequence the tokens that it would have got without them."""

from __future__ import annotations

import random

import pytest

from runner_svc.backends.hash_backend import HashBackend
from tests.support.drafters import LateHash, drafting_backend
from tests.support.drafting_driver import EOS_PROBABILITY, VOCAB_SIZE, DraftingDriver
from tests.support.thoroughness import count


@pytest.mark.parametrize("kind", [HashBackend, LateHash])
@pytest.mark.parametrize("run", range(count(100, in_ci=2)))
def test_streams_equal_those_without_drafts(kind: type[HashBackend], run: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    block_size = dice.choice([1, 3, 8, 16])
    backend = drafting_backend(
        kind,
        dice,
        wrong=dice.choice([0.0, 0.3]),
        max_drafts=dice.randint(2, 7),
        num_slots=5,
        block_size=block_size,
        num_blocks=400 // block_size,
        context_length=80,
        vocab_size=VOCAB_SIZE,
        eos_probability=EOS_PROBABILITY,
    )
    driver = DraftingDriver(backend, dice, 20, depth=3)
    driver.run()
    assert driver.drafted > 20 and driver.accepted > 5, "hardly any draft was tried"
