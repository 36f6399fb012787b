"""The tokens that hashes of contexts choose, and made-up log-probabilities of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID, IM_START_ID, NUM_TOKENS
from runner_svc.sampling.noise import GOLDEN, MASK64, draw_key, mix64

_NUM_SPECIALS = NUM_TOKENS - IM_START_ID


class TokenPicker:
    """Maps the hash of a context to the next token; shared by the backend and `expected_tokens`.

    `eos_probability` is the probability of the EOS token at each position; other special tokens are never picked.
    """

    def __init__(self, vocab_size: int, eos_probability: float) -> None:
        self._num_ordinary = vocab_size - _NUM_SPECIALS
        self._eos_below = int(eos_probability * 2**32)

    def pick(
        self,
        context_hash: int,
        position: int,
        forbidden: Iterable[int],
        noise: tuple[int, int] | None,
        allowed: Sequence[int] | None = None,
    ) -> int:
        """Returns the token at `position`, which is none of `forbidden`.

        `position` matters only with `noise`, the seed and sample index. `allowed` are a mask's ids in ascending order;
        `forbidden` is then ignored.
        """
        value = mix64(context_hash ^ GOLDEN)
        if noise is not None:
            value = mix64(value ^ draw_key(*noise, position))
        banned = set(forbidden)
        if allowed is not None:
            return allowed[(value >> 32) * len(allowed) >> 32]
        while True:
            token = self._token(value)
            if token not in banned:
                return token
            value = mix64((value + GOLDEN) & MASK64)

    def _token(self, value: int) -> int:
        if value & 0xFFFFFFFF < self._eos_below:
            return IM_END_ID
        ordinary = (value >> 32) * self._num_ordinary >> 32
        return ordinary if ordinary < IM_START_ID else ordinary + _NUM_SPECIALS


def expected_logprobs(token: int, position: int, top: int, vocab_size: int) -> tuple[float, list[int], list[float]]:
    """Returns made-up (logprob, top ids, top logprobs) of `token` at `position`; the token itself is the likeliest."""
    value = -float(mix64((token << 32) + position) % 1000) / 1000
    return value, [(token + i) % vocab_size for i in range(top)], [value - i for i in range(top)]


def only_logprobs(token: int, top: int) -> tuple[float, list[int], list[float]]:
    """Returns the same for the only token that a mask allows, as any backend would: no other is possible."""
    ids = [token, *(other for other in range(top) if other != token)][:top]
    return 0.0, ids, [0.0, *[-math.inf] * top][: len(ids)]


def packed_logprobs(
    row: int, first_position: int, top: int, entries: list[tuple[float, list[int], list[float]]]
) -> plan_pb2.RowLogprobs:
    """Returns the message of a row's entries: log-probability, top ids and top log-probabilities of each token."""
    return plan_pb2.RowLogprobs(
        row=row,
        first_position=first_position,
        values=np.array([value for value, _, _ in entries], "<f4").tobytes(),
        top=top,
        top_ids=np.array([ids for _, ids, _ in entries], "<i4").tobytes(),
        top_values=np.array([values for _, _, values in entries], "<f4").tobytes(),
    )
