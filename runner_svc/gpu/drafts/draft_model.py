"""The passes of a draft model on the device: the launches that propose, inside the graph of a verifying pass.

A drafting pass over R rows proposes S tokens of each. The first launches compute the last `FIRST` known tokens of each
row, so that KV of tokens that the passes before did not see is there, and draw the first draft. Each further pass
computes the draft before. Positions come from the slots' counters, as in the pass that verifies. Drafts are drawn as
`draft_draws` says.

Rows whose positions would lie beyond their blocks or the model's context compute nothing useful and propose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, DeviceInputs
from runner_svc.decoder.hidden import Hidden
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_draws import DraftDraws
from runner_svc.gpu.step_buffers import PackedStep, aligned
from runner_svc.gpu.steps import CudaSteps, MixedStep
from runner_svc.interface.attention_launcher import VerifyRows
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers
from runner_svc.interface.step import StepBatch

FIRST = 4
"""Known tokens of a row that its first pass computes."""
CATCH_UP = 1024
"""Most positions of a step that are computed to catch up, over all rows."""
_NEVER = -1e30
"""Logit of an id that the draft model does not have: finite, as others mark the row."""


@dataclass(frozen=True, slots=True)
class DraftParts:
    """A draft model before it has a cache."""

    name: str
    """As the setting `draft` has it."""
    launchers: Launchers
    make_decoder: Callable[[int], CudaDecoder]
    """Makes the decoder for passes of this many positions, on the device's stream."""


class CatchingUp(CudaSteps):
    """Passes of a draft model alone; ids that it does not have are read as its last one."""

    def _gathered(self, stream: int, num_rows: int, num_tokens: int) -> DeviceInputs:
        inputs = super()._gathered(stream, num_rows, num_tokens)
        inputs.tokens.clamp_(max=self._decoder.config.vocab_size - 1)
        return inputs


class DraftModel:
    """A draft model over the slots of a backend."""

    def __init__(
        self,
        decoder: CudaDecoder,
        launchers: Launchers,
        draws: DraftDraws,
        slots: DeviceSlots,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        vocab_size: int,
    ) -> None:
        """`draws`: from logits of the target's `vocab_size` ids."""
        device, self.context_length = decoder.device, decoder.config.context_length
        self.cache = KVCache(decoder.config, num_blocks, block_size, decoder.dtype, device)
        sizes = {"num_slots": num_slots, "max_step_tokens": CATCH_UP, "tail_words": 8}
        self.steps = CatchingUp(decoder, self.cache, slots, launchers, **sizes)
        """Passes that catch up."""
        self._decoder, self._slots, self.draws = decoder, slots, draws
        self._attention = launchers.attention(self.cache, slots.tables, num_slots, decoder.config.attention_layers)
        self._gather = launchers.drafts(slots.tokens, slots.counters, slots.tables, block_size).gather
        self._vocab, self._own_vocab = vocab_size, decoder.config.vocab_size
        self._logits = self.steps.logits
        if self._own_vocab != vocab_size:
            self._logits = torch.full((num_slots, vocab_size), _NEVER, device=device)

        def words(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._counters = words(num_slots + 1)
        self._resolved, self._inputs = words(3, num_slots), words(3, num_slots * FIRST)
        self._rows = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        batches = range(1, num_slots + 1)
        self._first_words, self._next_words = (
            aligned(max(self._attention.verify_plan_words(batch, positions) for batch in batches))
            for positions in (FIRST, 1)
        )

    @property
    def plan_words(self) -> int:
        """The most words of the plans of a drafting pass."""
        return self._first_words + self._next_words

    def pack(self, rows: VerifyRows, plan: NDArray[np.int32], batch: int, drafts: int) -> None:
        """Fills `plan` [plan_words] for passes of up to `batch` rows that propose `drafts` tokens.

        `rows` are those of the pass that verifies.
        """
        first = np.arange(len(rows.table_rows), dtype=np.int32)
        early = VerifyRows(
            np.maximum(rows.lowers - (FIRST - 1), 1),
            np.maximum(rows.uppers - (FIRST - 1), 1),
            rows.table_rows,
            first * FIRST,
        )
        words = self._attention.verify_plan_words(batch, FIRST)
        self._attention.plan_verify(early, plan[:words], batch, FIRST)
        words = self._attention.verify_plan_words(batch, 1)
        later = VerifyRows(rows.lowers + 1, rows.uppers + max(1, drafts - 1), rows.table_rows, first)
        self._attention.plan_verify(later, plan[self._first_words :][:words], batch, 1)

    def propose(self, stream: int, rows: DraftRows, prompt_lens: Tensor, proposals: Tensor, plan: int) -> None:
        """Fills `proposals`, int32 [R, S]; `plan`: the device address of what `pack` filled."""
        most = proposals.shape[1]
        known = self._slots.counters.index_select(0, rows.slots)
        limits = rows.limits.clamp(max=self.context_length)
        fits = (rows.counts > 0) & (known >= 1) & (known <= limits)
        self._first_pass(stream, rows, prompt_lens, known, fits, plan)
        self._draw(stream, rows.slots, known, fits, proposals[:, 0])
        for place in range(1, most):
            positions = known + (place - 1)  # of the last draft
            fits = fits & (positions < limits) & (proposals[:, place - 1] >= 0)
            self._next_pass(stream, rows, prompt_lens, positions, fits, plan)
            self._draw(stream, rows.slots, positions + 1, fits, proposals[:, place])

    def catch_up(self, step: PackedStep, batch: StepBatch) -> MixedStep:
        """Packs a step of positions that rows missed; nothing samples."""
        return self.steps.pack_mixed(step, batch)

    def _first_pass(
        self, stream: int, rows: DraftRows, prompt_lens: Tensor, known: Tensor, fits: Tensor, plan: int
    ) -> None:
        count = len(known)
        firsts, present, drafted = self._resolved[:, :count]
        torch.mul(known.clamp(max=FIRST), fits, out=present)
        torch.mul(known - present, fits, out=firsts)
        torch.sub(present.clamp(min=1), 1, out=drafted)
        torch.clamp(self._slots.counters - (FIRST - 1), min=1, out=self._counters)
        offsets = self._rows[: count + 1] * FIRST
        tokens, positions, slot_mapping = self._inputs[:, : count * FIRST].unbind()
        own = DraftRows(rows.slots, rows.starts, rows.counts, rows.limits, offsets, firsts, present, drafted)
        self._gather(stream, own, tokens, positions, slot_mapping)
        self._clamp(tokens)
        inputs = self._decoder.inputs(tokens, positions, slot_mapping, StepRows(offsets, prompt_lens))
        hidden = self._forward(stream, inputs, plan, count, FIRST, drafted)
        self._decoder.logits(stream, hidden.select(offsets[:-1] + drafted), self.steps.logits[:count])

    def _next_pass(
        self, stream: int, rows: DraftRows, prompt_lens: Tensor, places: Tensor, fits: Tensor, plan: int
    ) -> None:
        """Computes the last drafts, at the positions `places` [R] of those rows that `fits` [R]."""
        count, block_size, tables = len(places), self.cache.block_size, self._slots.tables
        tokens, positions, slot_mapping = self._inputs[:, :count].unbind()
        torch.clamp(self.draws.tokens[:count], min=0, out=tokens)
        self._clamp(tokens)
        torch.mul(places, fits, out=positions)
        indexes = rows.slots.long() * tables.shape[1] + torch.div(positions, block_size, rounding_mode="floor")
        blocks = tables.view(-1).index_select(0, indexes)
        torch.mul(blocks * block_size + positions % block_size, fits, out=slot_mapping)
        # Of the slots: a row's counter is that of the tokens up to the draft.
        self._counters.index_copy_(0, rows.slots.long(), places + 1)
        inputs = self._decoder.inputs(tokens, positions, slot_mapping, StepRows(self._rows[: count + 1], prompt_lens))
        hidden = self._forward(stream, inputs, plan + 4 * self._first_words, count, 1, None)
        self._decoder.logits(stream, hidden, self.steps.logits[:count])

    def _forward(
        self, stream: int, inputs: DeviceInputs, plan: int, batch: int, positions: int, drafted: Tensor | None
    ) -> Hidden:
        def attend(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
            counters = self._counters
            self._attention.run_verify(stream, layer, queries, output, plan, batch, positions, counters, drafted)

        return self._decoder.forward(stream, inputs, self.cache, attend, self._decoder.fusions[0])

    def _draw(self, stream: int, slots: Tensor, positions: Tensor, fits: Tensor, proposals: Tensor) -> None:
        """Draws the tokens at `positions` [R] from the logits of the last pass; -1 where they are not usable."""
        logits = self._logits[: len(positions)]
        if self._own_vocab != self._vocab:
            shared = min(self._own_vocab, self._vocab)
            logits[:, :shared] = self.steps.logits[: len(positions), :shared]
            logits[:, shared:] = _NEVER  # adjustments change it
        self.draws.draw(stream, logits, slots, positions, fits, proposals)

    def _clamp(self, tokens: Tensor) -> None:
        """Reads ids that the draft model does not have as its last one."""
        if self._own_vocab < self._vocab:
            tokens.clamp_(max=self._own_vocab - 1)
