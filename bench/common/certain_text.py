"""Random weights whose texts are certain, and a drafter that knows them: what drafts cost and gain needs no training.

The head makes a token's successor certain, because a drafter could not know near ties, and the layers' products hardly
add to the residual stream. They take the time that others take.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.model.config import ModelConfig
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import MlpWeights, ModelWeights
from runner_svc.weights.plain_matrix import PlainMatrix

_SHIFT = 12_347
_ADDED = 1e-4
"""Factor of the matrices whose products are added to the residual stream."""
_MASK = 0xFFFFFFFF


def shift_of(config: ModelConfig) -> int:
    """Returns by how much a token's successor is greater, modulo the vocabulary; of tied embeddings 0."""
    return 0 if config.tied_embeddings else _SHIFT


def certain(weights: ModelWeights, config: ModelConfig) -> ModelWeights:
    """Returns the weights with a certain successor of each token."""
    layers = list(weights.layers)
    for layer in layers:
        for matrix in (layer.output.matrix, layer.mlp.down.matrix if isinstance(layer.mlp, MlpWeights) else None):
            if isinstance(matrix, PlainMatrix):
                matrix.weight.mul_(_ADDED)
    shift = shift_of(config)
    head = LinearWeights(PlainMatrix(weights.embeddings.roll(shift, 0))) if shift else weights.head
    return replace(weights, layers=iter(layers), head=head)


class SuccessorDrafts:
    """A `ProposeLauncher` in torch, which graphs capture: the successors of each row's last token, some of them wrong.

    Whether the draft at a position is right depends on the slot and the position alone.
    """

    def __init__(self, slots: DeviceSlots, shift: int, vocab_size: int, right: float) -> None:
        """`right`: probability that a draft is right."""
        self._slots = slots
        self._shift, self._vocab_size = shift, vocab_size
        self._right = torch.tensor(int(right * 0x10000), device=slots.tokens.device)

    def be_right(self, right: float) -> None:
        """Changes the probability, for captured launches too."""
        self._right.fill_(int(right * 0x10000))

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        """Fills `proposals`, int32 [R, S]; -1 where a row wants no more."""
        slots = rows.slots.long().unsqueeze(1)
        counters = self._slots.counters[slots].long()
        steps = torch.arange(proposals.shape[1], device=proposals.device)
        last = self._slots.tokens[slots, (counters - 1).clamp(min=0)].long()
        drafts = last + self._shift * (steps + 1)
        drafts += self._lots(slots, counters + steps) >= self._right
        wanted = torch.where(rows.starts < 0, rows.counts - 1, 0).unsqueeze(1)
        proposals.copy_(torch.where(steps < wanted, drafts % self._vocab_size, -1))

    @staticmethod
    def _lots(slots: Tensor, positions: Tensor) -> Tensor:
        """Returns a hash from 0 to 0xFFFF of each slot and position."""
        lots = (slots * 1_000_003 + positions) * 2_654_435_761 & _MASK
        lots = (lots ^ lots >> 15) * 2_246_822_519 & _MASK
        lots = (lots ^ lots >> 13) * 3_266_489_917 & _MASK
        return (lots ^ lots >> 16) & 0xFFFF
