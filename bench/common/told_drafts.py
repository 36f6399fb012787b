"""A drafter of trials on a GPU: it proposes the tokens in a tensor, right or wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.interface.draft_launchers import DraftLaunchers, DraftRows


class ToldDrafts:
    """Implements `runner_svc.interface.draft_launchers.ProposeLauncher` in torch, which graphs capture."""

    def __init__(self, launchers: DraftLaunchers, slots: DeviceSlots) -> None:
        self.texts = torch.full_like(slots.tokens, -1)
        """int32 [slots + 1, context_length]: by slot and position the token that is proposed there; -1 is none."""
        self._counters = slots.counters

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        """Fills `proposals`, int32 [R, S], with the tensor's tokens from each row's counter on."""
        slots = rows.slots.long()
        steps = torch.arange(proposals.shape[1], device=proposals.device)
        places = (self._counters[slots].unsqueeze(1) + steps).clamp(0, self.texts.shape[1] - 1)
        wanted = torch.where(rows.starts < 0, rows.counts - 1, 0).unsqueeze(1)
        proposals.copy_(torch.where(steps < wanted, self.texts[slots.unsqueeze(1), places], -1))
