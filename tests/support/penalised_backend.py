"""A hash backend with penalties: the next token depends on each token's count in the prompt and in the output."""

from __future__ import annotations

from typing import Any

import numpy as np

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.noise import mix64

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class PenalisedBackend(HashBackend):
    """A token counted on the wrong side of the prompt's end changes the output."""

    def _pick(self, batch: StepBatch, row: int, position: int, context_hash: int, *rest: Any) -> int:
        params, state = batch.params[row], batch.states[row]
        known = self.host_slots.tokens[state.slot]  # with the drafts
        penalties = [float(params[name]) for name in _PENALTIES]
        if penalties != [1.0, 0.0, 0.0]:
            for number, tokens in enumerate((known[: state.prompt_len], known[state.prompt_len : position])):
                counts = np.bincount(tokens, minlength=1).tolist()
                context_hash ^= mix64(hash((number, *counts, *penalties)) & (2**64 - 1))
        return super()._pick(batch, row, position, context_hash, *rest)
