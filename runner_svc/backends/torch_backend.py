"""The backend that computes a real model with torch.

A step is one forward pass over all positions of the batch, then logits for the sampling rows (and for the prompt
positions to be scored), then the sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from roster_protos import plan_pb2
from runner_svc.arithmetic.plain import PLAIN
from runner_svc.backends.decoder_loading import determinism_of, load_decoder
from runner_svc.backends.determinism import Determinism
from runner_svc.backends.forward_pass import ForwardPass
from runner_svc.backends.host_slots import HostSlots
from runner_svc.catalog.source import model_folder
from runner_svc.decoder.served_decoder import ServedDecoder
from runner_svc.drafting.drafter import Drafter, HiddenDrafter
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import WHOLE, Communicator
from runner_svc.interface.step import MaskedDraw, StepBatch, StepOutput
from runner_svc.model.checkpoint.weights import weight_formats, weights_fingerprint
from runner_svc.model.config import ModelConfig
from runner_svc.model.decoder_choice import DecoderSetting
from runner_svc.model.description import describe_model
from runner_svc.model.fingerprints import fingerprints
from runner_svc.sampling.sampled_positions import each_position, logit_indexes, row_logprobs
from runner_svc.sampling.sampler import SampledRows, Sampler
from runner_svc.weights.on_load import NOTHING, OnLoad

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model that drafts are for, and the sizes of its backend."""

    model: plan_pb2.Model
    decoder: ServedDecoder
    num_slots: int
    num_blocks: int
    block_size: int


MakeDrafter = Callable[[DraftTarget], Drafter]


class TorchBackend:
    """A decoder, its KV cache and a sampler on one device; implements `runner_svc.interface.backend.SlotBackend`."""

    tile_tokens = 1

    def __init__(
        self,
        model: plan_pb2.Model,
        decoder: ServedDecoder,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_step_tokens: int,
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        determinism: Determinism | None = None,
        num_ranks: int = 1,
    ) -> None:
        """`max_drafts`: most drafts of a row; 0 unless there is a `drafter`, and at most what it can propose.

        `determinism` has made the parts of the decoder, which is one of `num_ranks`.
        """
        config = decoder.config
        if isinstance(drafter, HiddenDrafter):
            max_drafts = min(max_drafts, drafter.max_drafts)
        device = torch.device("cpu")
        self.model = model
        self.device = str(device)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.max_step_tokens = max_step_tokens
        self.max_drafts = max_drafts if drafter is not None else 0
        self.drafter_name = drafter.name if drafter is not None else ""
        self.host_slots = HostSlots(num_slots, model.context_length, block_size, drafter, config.vocab_size)
        self._pass = ForwardPass(decoder, num_blocks, block_size, determinism)
        self.cache = self._pass.cache
        self.fingerprints = fingerprints(config, device, torch.float32, torch.float32, num_ranks)
        self._decoder = decoder
        if determinism is not None:
            model.numerics = determinism.numerics()
        self._sampler = Sampler(config.vocab_size, device)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        cache_folder: Path,
        progress: Progress,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_step_tokens: int,
        decoder: DecoderSetting = "auto",
        on_load: OnLoad = NOTHING,
        drafter: Drafter | None = None,
        make_drafter: MakeDrafter | None = None,
        max_drafts: int = 0,
        deterministic: bool = False,
        ranks: Communicator | None = None,
    ) -> TorchBackend:
        """Loads the model `name` (see `model_folder`) in float32 on the CPU; see `load_weights` for `on_load`.

        With `ranks` it is a rank's part of the model, and nothing is exchanged before the first step. `make_drafter`
        makes a drafter that depends on the model, once that is loaded.
        Raises ModelNotFound if there is no such model, UnsupportedModel if it can't be served,
        UnusableSettings if it can't be `deterministic`.
        """
        folder = model_folder(name, cache_folder, progress)
        shard = ranks.shard if ranks is not None else WHOLE
        determinism = determinism_of(folder, decoder, block_size, on_load, shard) if deterministic else None
        arithmetic = determinism.arithmetic if determinism is not None else PLAIN
        loaded = load_decoder(folder, decoder, progress, on_load, arithmetic, ranks)
        version = weights_fingerprint(folder, torch.float32, on_load)
        model = describe_model(name, folder, loaded.config, version, cache_folder, progress)
        if isinstance(loaded.config, ModelConfig):
            model.weight_formats = weight_formats(loaded.config, on_load)
        if make_drafter is not None:
            drafter = make_drafter(DraftTarget(model, loaded, num_slots, num_blocks, block_size))
        return cls(
            model,
            loaded,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            max_step_tokens=max_step_tokens,
            drafter=drafter,
            max_drafts=max_drafts,
            determinism=determinism,
            num_ranks=shard.size,
        )

    def change_slots(self, changes: SlotChanges) -> None:
        self.host_slots.change(changes)

    @torch.inference_mode()
    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks; all sources are read before any target is written."""
        self._pass.copy_blocks(sources, targets)
        self.host_slots.copy_blocks(sources, targets)

    @property
    def cache_regions(self) -> list[NDArray[np.uint8]]:
        """The cache itself, as `ThreadCopier` copies it, and what a drafter keeps of the model's states in it."""
        reader = self.host_slots.reader
        kept = [self.cache.data.flatten(0, 1), *(reader.kept_by_block() if reader is not None else ())]
        return [each.view(torch.uint8).numpy().reshape(len(each), self.num_blocks + 1, -1) for each in kept]

    def forget_drafts(self, blocks: NDArray[np.int32]) -> None:
        """Has the drafter forget what it keeps of blocks that are loaded from the host pool."""
        self.host_slots.forget_drafts(blocks)

    def is_broken_by(self, error: Exception) -> bool:
        return False

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepOutput:
        """Writes the KV of every position and samples the rows with `sample` set."""
        started = time.perf_counter_ns()
        batch = self.host_slots.gathered(batch)
        hidden = self._pass.hidden(batch)
        if self.host_slots.reader is not None:
            self.host_slots.reader.follow(batch, hidden)
        rows = np.flatnonzero(batch.sample)
        verified = batch.drafts[rows] if len(batch.drafts) else np.zeros(len(rows), np.int32)
        # [P, hidden_size]; P is 0 if no prompt is complete
        states = self._decoder.final_states(hidden[torch.from_numpy(logit_indexes(batch, rows, verified))])
        logits = self._decoder.head(states)
        forwarded = time.perf_counter_ns()
        if len(batch.awaits):
            waits = torch.from_numpy(np.repeat(np.isin(rows, batch.awaits), 1 + verified))
            masked_rows = self._keep_masked_rows(logits[waits], batch)
            output = self._sample(logits[~waits], batch, batch.drawing_rows)
            output.masked_rows, states = masked_rows, states[~waits]
        else:
            output = self._sample(logits, batch, rows)
        if (observer := self.host_slots.observer) is not None:
            self._show_states(observer, batch, states, output)
        output.prompt_logprobs = self._prompt_logprobs(hidden, batch)
        output.forward_ns = forwarded - started
        output.sample_ns = time.perf_counter_ns() - forwarded
        return output

    def _sample(self, logits: Tensor, batch: StepBatch, rows: NDArray[np.intp]) -> StepOutput:
        if len(batch.drafts):
            return self._verify(logits, batch, rows)
        return self._drawn(self._sampler.sample(logits, batch, rows), batch, rows, batch.slots[rows])

    def _verify(self, logits: Tensor, batch: StepBatch, rows: NDArray[np.intp]) -> StepOutput:
        """Draws a token after each position of `logits` [P, vocab_size], those of `rows` [L], and accepts drafts."""
        verified = batch.drafts[rows]
        positions = each_position(batch, rows, verified, self.host_slots.tokens)
        sampled = self._sampler.sample(logits, positions, np.arange(len(logits)))
        output = self.host_slots.verify(batch, rows, sampled.tokens, sampled.finite)
        firsts = np.cumsum(1 + verified, dtype=np.int64) - (1 + verified)
        output.logprobs = row_logprobs(rows, firsts, output.token_counts[rows], sampled.logprobs)
        return output

    def _show_states(self, observer: HiddenDrafter, batch: StepBatch, states: Tensor, output: StepOutput) -> None:
        """Shows the drafter each row's state before its last token; `states` [P, hidden_size] as in `_verify`."""
        rows = batch.drawing_rows
        verified = batch.drafts[rows] if len(batch.drafts) else np.zeros(len(rows), np.int32)
        counts = output.token_counts[rows].astype(np.int32)
        drew = counts > 0
        lasts = np.cumsum(1 + verified, dtype=np.int64) - (1 + verified) + counts - 1
        counters = batch.ends[rows] - verified + counts
        observer.observe(batch.slots[rows[drew]], counters[drew], states[torch.from_numpy(lasts[drew])])

    def _keep_masked_rows(self, logits: Tensor, batch: StepBatch) -> MaskedDraw:
        """Returns the draw of the rows that wait for masks; their logits are adjusted for the tokens known now."""
        rows = batch.awaits
        finite = self._sampler.adjust(logits, batch, rows)
        epochs = self.host_slots.epochs[batch.slots[rows]]

        def draw(masks: NDArray[np.uint32], gone: NDArray[np.bool_]) -> StepOutput:
            sampled = self._sampler.draw(finite, logits, batch, rows, masks)
            return self._drawn(sampled, batch, rows, self.host_slots.redirected(batch.slots[rows], gone), epochs)

        return MaskedDraw(draw)

    def _drawn(
        self,
        sampled: SampledRows,
        batch: StepBatch,
        rows: NDArray[np.intp],
        slots: NDArray[np.int32],
        epochs: NDArray[np.int64] | None = None,
    ) -> StepOutput:
        """Writes the drawn tokens into the token buffer at `slots` [L]; returns the output."""
        written = sampled.finite
        self.host_slots.write(
            slots[written],
            batch.ends[rows][written],
            sampled.tokens[written],
            epochs[written] if epochs is not None else None,
        )
        output = StepOutput.sampled(len(batch.slots), rows, sampled.tokens, sampled.finite)
        output.logprobs = sampled.logprobs
        return output

    def _prompt_logprobs(self, hidden: Tensor, batch: StepBatch) -> list[plan_pb2.RowLogprobs]:
        """Returns log-probabilities of prompt tokens for the rows that request them.

        Rows are computed one by one, so that only one row's logits are in memory.
        """
        scored = []
        offset = 0
        for row, count in enumerate(batch.counts.tolist()):
            num_scored = batch.num_scored(row)
            if num_scored:
                logits = self._decoder.logits(hidden[offset : offset + num_scored])
                scored.append(self._sampler.prompt_logprobs(logits, batch, row))
            offset += count
        return scored
