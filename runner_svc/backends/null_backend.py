"""A backend that computes nothing, for measuring the overhead of scheduler, link and streams.

The token at a position is the pangram's character there, so that all text is ASCII. It never draws an end-of-sequence
token: requests run to max_tokens or a stop string. Under a mask it draws the first allowed id. It reports no logprobs.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.byte_tokenizer import NUM_TOKENS, byte_model
from runner_svc.interface.step import MaskedDraw, StepBatch, StepOutput, allowed_ids

_TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog ", np.uint8).astype(np.int32)


class NullBackend:
    """`Backend` that computes nothing. Each step takes `step_ms` milliseconds."""

    device = "null"
    tile_tokens = 1

    def __init__(
        self,
        *,
        num_slots: int = 256,
        block_size: int = 16,
        num_blocks: int = 65536,
        max_step_tokens: int = 8192,
        vocab_size: int = NUM_TOKENS,
        context_length: int = 8192,
        step_ms: float = 0.0,
    ) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_step_tokens = max_step_tokens
        self.model = byte_model("null", "NullModel", vocab_size, context_length)
        self._step_s = step_ms / 1000

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Does nothing: there is no KV."""

    @property
    def cache_regions(self) -> list[NDArray[np.uint8]]:
        """Blocks of no bytes: `ThreadCopier` only counts copies."""
        return [np.zeros((1, self.num_blocks + 1, 0), np.uint8)]

    def is_broken_by(self, error: Exception) -> bool:
        return False

    def step(self, batch: StepBatch) -> StepOutput:
        began_at_ns = time.perf_counter_ns()
        rows = batch.drawing_rows
        tokens = _TEXT[batch.ends[rows] % len(_TEXT)]
        output = StepOutput.sampled(len(batch.slots), rows, tokens, np.ones(len(rows), np.bool_))
        if len(batch.awaits):
            output.masked_rows = MaskedDraw(partial(self._draw_masked, batch))
        if self._step_s > 0:
            time.sleep(self._step_s)
        output.forward_ns = time.perf_counter_ns() - began_at_ns
        return output

    def _draw_masked(self, batch: StepBatch, masks: NDArray[np.uint32], gone: NDArray[np.bool_]) -> StepOutput:
        """Draws the first allowed id; once the text is complete, that is an end token."""
        tokens = allowed_ids(masks, self.model.vocab_size).argmax(axis=1).astype(np.int32)
        return StepOutput.sampled(len(batch.slots), batch.awaits, tokens, np.ones(len(tokens), np.bool_))
