"""The sampler's reference: one row at a time, plain Python integers and float64, every step by its definition."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from runner_svc.sampling.noise import draw_key

_MASK32 = (1 << 32) - 1


@dataclass
class Row:
    """One row to sample: its logits, history and parameters, named as in plan.proto."""

    logits: list[float]
    tokens: list[int]  # prompt and output before the token to draw
    prompt_len: int
    seed: int = 0
    sample_index: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    stop_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None


def adjusted(row: Row) -> list[float]:
    """Returns the logits after penalties, bias and min_tokens."""
    logits = list(row.logits)
    output = Counter(row.tokens[row.prompt_len :])
    for token in set(row.tokens):
        value = logits[token]
        logits[token] = value / row.repetition_penalty if value > 0 else value * row.repetition_penalty
    for token, count in output.items():
        logits[token] -= row.presence_penalty + row.frequency_penalty * count
    for token, bias in row.bias.items():
        logits[token] += bias
    if output.total() < row.min_tokens:
        for token in row.stop_ids:
            logits[token] = -math.inf
    return logits


def log_softmax(logits: list[float]) -> list[float]:
    """Returns the natural logarithms of the probabilities."""
    largest = max(logits)
    total = math.log(math.fsum(math.exp(value - largest) for value in logits))
    return [value - largest - total for value in logits]


def kept(row: Row, logits: list[float]) -> list[int]:
    """Returns the tokens that may be drawn, likeliest first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: row.top_k or None]
    weights = [math.exp((logits[token] - logits[order[0]]) / row.temperature) for token in order]
    total = math.fsum(weights)
    survivors, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if survivors and (mass >= row.top_p * total or weight < row.min_p):
            break
        survivors.append(token)
        mass += weight
    return survivors


def probabilities(row: Row) -> dict[int, float]:
    """Returns the probability of each token that may be drawn."""
    logits = adjusted(row)
    survivors = kept(row, logits)
    values = log_softmax([logits[token] / row.temperature for token in survivors])
    return {token: math.exp(value) for token, value in zip(survivors, values, strict=True)}


def scores(row: Row) -> dict[int, float]:
    """Returns each drawable token's scaled logit plus noise, or a greedy row's logits; the largest is drawn."""
    logits = adjusted(row)
    if row.temperature == 0:
        return dict(enumerate(logits))
    key = draw_key(row.seed, row.sample_index, len(row.tokens))
    return {token: logits[token] / row.temperature + gumbel(key, token) for token in kept(row, logits)}


def gumbel(key: int, token: int) -> float:
    """Returns the noise of one token under one draw key."""
    low, high = key & _MASK32, key >> 32
    hashed = _lowbias32(_lowbias32((token + low) & _MASK32) ^ high)
    return -math.log(-math.log1p(-(hashed + 0.5) / 2**32))


def _lowbias32(value: int) -> int:
    value = (value ^ (value >> 16)) * 0x7FEB352D & _MASK32
    value = (value ^ (value >> 15)) * 0x846CA68B & _MASK32
    return value ^ (value >> 16)
