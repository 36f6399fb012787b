"""Positions of a row that verifies drafts are drawn as they would be in steps of their own."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

from runner_svc.interface.step import StepBatch
from runner_svc.sampling.sampled_positions import each_position, logit_indexes, row_logprobs
from runner_svc.sampling.sampler import Sampler
from tests.support.sampler_rows import sample, step_batch
from tests.support.sampler_twin import Row

VOCAB_SIZE = 40


def random_row(dice: random.Random) -> Row:
    prompt_len = dice.randint(1, 4)
    return Row(
        logits=[dice.gauss(0, 3) for _ in range(VOCAB_SIZE)],
        tokens=[dice.randrange(VOCAB_SIZE) for _ in range(prompt_len + dice.randint(0, 3))],
        prompt_len=prompt_len,
        seed=dice.getrandbits(64),
        sample_index=dice.randrange(3),
        temperature=dice.choice([0.0, 0.8]),
        top_k=dice.choice([0, 5]),
        repetition_penalty=dice.choice([1.0, 1.5]),
        frequency_penalty=dice.choice([0.0, 0.9]),
        min_tokens=dice.choice([0, 3]),
        bias={7: 1.5},
        stop_ids=[dice.randrange(VOCAB_SIZE)],
        logprobs=dice.choice([None, 0, 2]),
    )


def grown(batch: StepBatch, drafts: list[list[int]], extra: list[int]) -> tuple[StepBatch, np.ndarray]:
    """Returns the batch with each row's positions grown by its drafts and by `extra` before, and the token buffer."""
    tokens = np.full((len(drafts) + 1, 64), -1, np.int32)
    for slot, (state, own) in enumerate(zip(batch.states, drafts, strict=True)):
        written = [*state.tokens.tolist(), *own]
        tokens[slot, : len(written)] = written
    counts = batch.counts + np.array([len(own) for own in drafts], np.int32) + np.array(extra, np.int32)
    return dataclasses.replace(batch, starts=batch.starts - np.array(extra, np.int32), counts=counts), tokens


def test_each_position_is_drawn_as_in_a_step_of_its_own() -> None:
    """The host's copy of the tokens has no drafts, and the penalties count them all the same."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    rows = [random_row(dice) for _ in range(12)]
    drafts = [[dice.randrange(VOCAB_SIZE) for _ in range(dice.choice([0, 0, 1, 3]))] for _ in rows]
    drafts[0] = [rows[0].tokens[-1]] * 3
    extra = [dice.choice([0, len(row.tokens) - 1]) for row in rows]  # a chunk before, of rows without drafts
    extra = [count if not own else 0 for count, own in zip(extra, drafts, strict=True)]
    alone = [
        dataclasses.replace(row, tokens=row.tokens + own[:place], logits=[x * (1 + place) for x in row.logits])
        for row, own in zip(rows, drafts, strict=True)
        for place in range(len(own) + 1)
    ]
    expected = sample(alone)
    batch, tokens = grown(step_batch(rows), drafts, extra)
    chosen = np.array(sorted(dice.sample(range(len(rows)), len(rows) - 2)))
    verified = np.array([len(drafts[row]) for row in chosen], np.int32)
    positions = each_position(batch, chosen, verified, tokens)
    kept = [
        i for i, row in enumerate(row for row, own in enumerate(drafts) for _ in range(len(own) + 1)) if row in chosen
    ]
    logits = torch.tensor([alone[i].logits for i in kept], dtype=torch.float32)
    drawn = Sampler(VOCAB_SIZE).sample(logits, positions, np.arange(len(kept)))
    assert drawn.tokens.tolist() == expected.tokens[kept].tolist()
    solo = {entry.row: entry for entry in expected.logprobs}
    for entry in drawn.logprobs:
        twin = solo.pop(kept[entry.row])
        assert (entry.values, entry.top_ids, entry.top_values) == (twin.values, twin.top_ids, twin.top_values)
    assert not set(solo) & set(kept)


def test_logits_are_those_of_the_last_positions() -> None:
    batch, _ = grown(
        step_batch([Row([0.0], [0, 0, 0], 1), Row([0.0], [0], 1), Row([0.0], [0], 1)]), [[], [0, 0], []], [2, 0, 0]
    )
    indexes = logit_indexes(batch, np.array([0, 1, 2]), np.array([0, 2, 0], np.int32))
    assert indexes.tolist() == [2, 3, 4, 5, 6]
    assert logit_indexes(batch, np.array([0, 2]), np.array([0, 0], np.int32)).tolist() == [2, 6]


def test_log_probabilities_of_kept_tokens_are_one_entry_of_their_row() -> None:
    rows = [Row([0.5, 1.5, 2.5], [1], 1, logprobs=1, temperature=0)] * 3 + [Row([0.0, 1.0, 2.0], [1], 1)] * 2
    entries = sample(rows).logprobs
    (joined,) = row_logprobs(np.array([4, 9]), np.array([0, 3]), np.array([2, 2]), entries)
    assert (joined.row, joined.top, joined.first_position) == (4, 1, 0)
    assert joined.values == entries[0].values * 2 and np.frombuffer(joined.top_ids, np.int32).tolist() == [2, 2]
    assert row_logprobs(np.array([4, 9]), np.array([0, 3]), np.array([0, 1]), entries) == []
