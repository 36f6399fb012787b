"""The draft model of the torch backend: any model that a decoder serves, with the target's tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from runner_svc.backends.decoder_loading import load_decoder
from runner_svc.backends.forward_pass import ForwardPass
from runner_svc.backends.model_drafter import ModelDrafter
from runner_svc.backends.torch_backend import DraftTarget
from runner_svc.decoder.served_decoder import ServedDecoder
from runner_svc.drafting.draft_counters import DraftCounters
from runner_svc.interface.progress import Progress
from runner_svc.interface.step import StepBatch
from runner_svc.model.description import describe_model
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.tokenizer.same_tokens import different_tokens
from runner_svc.sampling.sampler import Sampler
from runner_svc.settings.drafter_names import MODEL
from runner_svc.weights.on_load import NOTHING, OnLoad

_NEVER = -1e30
"""Logit of an id that the draft model does not have: finite, as others mark the row."""


class TorchDraftModel:
    """Implements `runner_svc.backends.model_drafter.DraftModel`."""

    def __init__(
        self, decoder: ServedDecoder, vocab_size: int, context_length: int, num_blocks: int, block_size: int
    ) -> None:
        """`vocab_size`: the target's. `context_length`: most positions of a sequence."""
        self.context_length = context_length
        self.cache_pass = ForwardPass(decoder, num_blocks, block_size)
        self._own_vocab, self._vocab = decoder.config.vocab_size, vocab_size
        self._sampler = Sampler(vocab_size)

    @torch.inference_mode()
    def draw(self, batch: StepBatch) -> NDArray[np.int32]:
        """As `DraftModel.draw`. An id that the draft model does not have is read as its last one."""
        if self._own_vocab < self._vocab:
            np.minimum(batch.tokens, self._own_vocab - 1, out=batch.tokens)
        hidden = self.cache_pass.hidden(batch)
        rows = np.flatnonzero(batch.sample)
        if not len(rows):
            return np.zeros(0, np.int32)
        lasts = np.cumsum(batch.counts, dtype=np.int64)[rows] - 1
        logits = self._of_target(self.cache_pass.decoder.logits(hidden[torch.from_numpy(lasts)]))
        sampled = self._sampler.sample(logits, batch, rows)
        return np.where(sampled.finite, sampled.tokens, -1).astype(np.int32)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """As `DraftModel.copy_blocks`."""
        self.cache_pass.copy_blocks(sources, targets)

    def _of_target(self, logits: Tensor) -> Tensor:
        """Returns logits of the target's ids, float32 [L, vocab_size]."""
        if self._own_vocab < self._vocab:
            return functional.pad(logits, (0, self._vocab - self._own_vocab), value=_NEVER)
        return logits if self._own_vocab == self._vocab else logits[:, : self._vocab].contiguous()


def load_draft_model(
    name: str, folder: Path, target: DraftTarget, cache_folder: Path, progress: Progress, on_load: OnLoad = NOTHING
) -> ModelDrafter:
    """Loads the draft model `name`, of `folder`, in float32; see `load_weights` for `on_load`.

    Raises ModelNotFound if a part of it is missing, UnsupportedModel if it can't be served, or if its tokens are not
    those of the target.
    """
    decoder = load_decoder(folder, "auto", progress, on_load)
    model = describe_model(name, folder, decoder.config, "", cache_folder, progress)
    if (difference := different_tokens(model.tokenizer, target.model.tokenizer)) is not None:
        raise UnsupportedModel(f"{difference}: use a draft model with the tokenizer of the served model.")
    num_slots, num_blocks, block_size = target.num_slots, target.num_blocks, target.block_size
    drafting = TorchDraftModel(decoder, target.decoder.config.vocab_size, model.context_length, num_blocks, block_size)
    by_prompt = decoder.config.prefix_positions is not None
    counters = DraftCounters(num_slots, num_blocks, block_size, by_prompt=by_prompt)
    return ModelDrafter(f"{MODEL}:{name}", drafting, counters, num_slots, block_size)
