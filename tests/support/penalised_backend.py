"""A hash backend that honours penalties: the next token depends on how often each token came, and on which side of the
prompt's end it did."""

from __future__ import annotations

from typing import Any

import numpy as np

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.noise import mix64

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class PenalisedBackend(HashBackend):
    """What was counted as generated, and is the prompt's in truth, or the other way round, becomes a wrong token."""

    def _pick(self, batch: StepBatch, row: int, context_hash: int, *rest: Any) -> int:
        params, state, position = batch.params[row], batch.states[row], int(batch.ends[row])
        penalties = [float(params[name]) for name in _PENALTIES]
        if penalties != [1.0, 0.0, 0.0]:
            for number, tokens in enumerate(
                (state.tokens[: state.prompt_len], state.tokens[state.prompt_len : position])
            ):
                counts = np.bincount(tokens, minlength=1).tolist()
                context_hash ^= mix64(hash((number, *counts, *penalties)) & (2**64 - 1))
        return super()._pick(batch, row, context_hash, *rest)
