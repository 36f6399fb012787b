"""EAGLE's draft layer over the slots of a GPU backend: what it keeps of a pass, and the drafts that it draws.

As `runner_svc.drafting.eagle.drafter`: states and KV lie under the model's block ids, and are written for all positions
that the model computes. Both are launches of the passes' graphs: the layer's attention reads the paged KV by a plan, as
the model's does. It sees no key of position 0, where the layer has nothing to read.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.drafting.eagle.checkpoint import EagleWeights
from runner_svc.drafting.eagle.layer import EagleLayer
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_draws import DraftDraws
from runner_svc.gpu.step_buffers import aligned
from runner_svc.interface.attention_launcher import VerifyRows
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers

_NEVER = -1e30
"""Logit of an id that the layer's head does not have: finite, as others mark the row."""


class EagleDraft:
    """A layer, its KV, and what it keeps of the model's states at the positions of the cache.

    Implements `runner_svc.gpu.drafts.planned_steps.PlannedDraft`.
    """

    def __init__(
        self,
        weights: EagleWeights,
        decoder: CudaDecoder,
        launchers: Launchers,
        draws: DraftDraws,
        slots: DeviceSlots,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
    ) -> None:
        """`weights` are on the decoder's device, in its dtype. `launchers`: of the layer's sizes."""
        config, device = weights.config, decoder.device
        self.draws = draws
        self._decoder, self._slots, self._block_size = decoder, slots, block_size
        self.cache = KVCache(config, num_blocks, block_size, decoder.dtype, device)
        embed = partial(functional.embedding, weight=decoder.embeddings)
        self._layer = EagleLayer(weights, embed, self.cache.data[0].flatten(1, 2))
        self._head_ids = weights.head_ids
        self._states = torch.zeros(
            (num_blocks + 1) * block_size, config.hidden_size, dtype=decoder.dtype, device=device
        )
        layers = [AttentionLayer(first=1)]
        self._attention = launchers.attention(self.cache, slots.tables, num_slots, layers)
        self._attended = torch.zeros(num_slots, config.num_heads * config.head_dim, dtype=decoder.dtype, device=device)
        self._counters = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.logits = torch.empty(0, decoder.config.vocab_size, device=device)
        """Room for the logits of a row's draft, float32 [at least R, vocab_size]: set before anything is proposed."""
        words = (self._attention.verify_plan_words(batch, 1) for batch in range(1, num_slots + 1))
        self._plan_words = aligned(max(words))

    @staticmethod
    def numbers_per_position(weights: EagleWeights) -> int:
        """Returns how many numbers are kept for a position of the cache."""
        config = weights.config
        return config.hidden_size + 2 * config.num_kv_heads * config.head_dim

    @property
    def plan_words(self) -> int:
        """The most words of a plan."""
        return self._plan_words

    def pack(self, rows: VerifyRows, plan: NDArray[np.int32], batch: int, drafts: int) -> None:
        """Fills `plan` [plan_words] for up to `batch` rows that propose `drafts` tokens."""
        every = np.arange(len(rows.table_rows), dtype=np.int32)
        own = VerifyRows(rows.lowers, rows.uppers + (drafts - 1), rows.table_rows, every)
        words = self._attention.verify_plan_words(batch, 1)
        self._attention.plan_verify(own, plan[:words], batch, 1)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks, int64 [N] each; all sources are read before any target is written."""
        self.cache.copy_blocks(sources, targets)
        blocks = self._states.view(-1, self._block_size, self._states.shape[1])
        blocks[targets] = blocks[sources]

    def kept_by_block(self) -> list[Tensor]:
        """Returns the states, and the layer's keys and values: only steps of the model could compute them again."""
        return [self._states[None], self._layer.cache]

    def follow(self, slots: Tensor, offsets: Tensor, inputs: Tensor, states: Tensor) -> None:
        """Takes what the layer reads of the model at all T positions of a pass.

        `slots` [R], `offsets` [R + 1]: of the rows of the pass. `inputs`: tokens, positions and places of the cache,
        int32 [3, T]; a padded place is position 0 of the dummy block. `states`: of EAGLE-1 those after the final norm,
        [T, hidden_size], of EAGLE-3 three within the model, [T, 3 * hidden_size].
        """
        tokens, positions, places = inputs.long()
        self._states.index_copy_(0, places, self._layer.fused(states))
        every = torch.arange(len(positions), device=positions.device)
        rows = torch.searchsorted(offsets[1:].long(), every, right=True).clamp(max=len(slots) - 1)
        before = self._places(slots.index_select(0, rows), (positions - 1).clamp(min=0))
        follows = positions > 0
        self._layer.write(
            tokens, self._states.index_select(0, before), positions.clamp(min=1), torch.where(follows, places, 0)
        )

    def propose(self, stream: int, rows: DraftRows, prompt_lens: Tensor, proposals: Tensor, plan: int) -> None:
        """Fills `proposals`, int32 [R, S]; `plan`: the device address of what `pack` filled."""
        slots, tokens = rows.slots, self._slots.tokens
        known = self._slots.counters.index_select(0, slots)
        fits = (rows.counts > 0) & (known > 1) & (known <= rows.limits)
        seen = torch.where(fits, known, 2)
        inputs = tokens.view(-1).index_select(0, slots.long() * tokens.shape[1] + seen - 1)
        states = self._states.index_select(0, self._places(slots, (seen - 2).long()))
        proposals.fill_(-1)
        for distance in range(proposals.shape[1]):
            fits = fits & (known + distance <= rows.limits)
            if distance:
                inputs = self.draws.tokens[: len(slots)].clamp(min=0)
                fits = fits & (proposals[:, distance - 1] >= 0)
            positions = torch.where(fits, known - 1 + distance, 1)
            states = self._step(stream, slots, inputs.long(), states, positions, fits, plan)
            self.draws.draw(
                stream, self._logits_of(stream, states), slots, known + distance, fits, proposals[:, distance]
            )

    def _step(
        self, stream: int, slots: Tensor, inputs: Tensor, states: Tensor, positions: Tensor, fits: Tensor, plan: int
    ) -> Tensor:
        """Returns the layer's outputs at `positions` [R], and writes the KV there of rows that `fits`."""
        # Attention reads it before it waits for the launches before it: of those, this is not the last.
        self._counters.index_copy_(0, slots.long(), positions.int() + 1)
        wide = positions.long()
        places = torch.where(fits, self._places(slots, wide), 0)
        queries, residual = self._layer.write(inputs, states, wide, places)
        attended = self._attended[: len(slots)]
        self._attention.run_verify(stream, 0, queries.flatten(1), attended, plan, len(slots), 1, self._counters, None)
        return self._layer.after(residual, attended)

    def _logits_of(self, stream: int, states: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] for outputs of the layer."""
        logits = self.logits[: len(states)]
        if self._head_ids is None:
            self._decoder.head_logits(stream, states, logits)
        else:
            logits.fill_(_NEVER)
            logits.index_copy_(1, self._head_ids, self._layer.head(states).float())
        return logits

    def _places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Returns the places in the cache of int64 `positions` of `slots`, int64, of the shape of both."""
        tables = self._slots.tables
        blocks = tables.view(-1)[slots.long() * tables.shape[1] + positions // self._block_size]
        return blocks.long() * self._block_size + positions % self._block_size
