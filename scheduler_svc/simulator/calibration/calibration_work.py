"""Requests of a calibration, which produce every kind of step at several sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from scheduler_svc.simulator.cost_model import RunnerShape

Round = list[tuple[int, int]]
"""(prompt tokens, output tokens) of requests that are submitted together."""

SHORT_PROMPT, DECODE_STEPS = 16, 12
"""Prompt tokens and output tokens of a round of decoding: a prompt that takes hardly any time, and steps enough that a
few disturbed ones can be left out."""


def fixed_rounds(shape: RunnerShape, context_length: int) -> Iterator[Round]:
    """Yields rounds that decode at batch sizes from 1 to all slots, with short and long contexts, then rounds of one
    prompt."""
    longest = min(context_length, shape.kv_tokens) - DECODE_STEPS - 1
    for batch in _doubling(1, shape.slots):
        yield [(SHORT_PROMPT, DECODE_STEPS)] * batch
        yield [
            (max(SHORT_PROMPT, min(longest, shape.step_tokens, shape.kv_tokens // batch - 64)), DECODE_STEPS)
        ] * batch
    for length in _doubling(32, min(longest, 2 * shape.step_tokens)):
        yield [(length, 2)]


def mixed_round(shape: RunnerShape, context_length: int, rng: random.Random) -> Round:
    """Returns three times as many requests as slots, of random lengths, so that prompts run with decoding rows."""
    longest = min(context_length, shape.kv_tokens) - 33
    longest_prompt = max(SHORT_PROMPT, min(longest, 2 * shape.step_tokens, 2 * shape.kv_tokens // shape.slots))
    return [(max(1, int(longest_prompt ** rng.uniform(0.4, 1.0))), rng.randint(2, 32)) for _ in range(3 * shape.slots)]


def _doubling(first: int, last: int) -> Iterator[int]:
    """Yields first, 2 first, 4 first, ... and last."""
    value = first
    while value < last:
        yield value
        value *= 2
    yield last
