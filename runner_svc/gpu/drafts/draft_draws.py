"""Draws drafts on the device as the target draws the tokens that they stand for.

A draft has the target's record of its row, at the draft's own position: so its parameters and noise, and penalties,
bias and min_tokens too. The kernels count a row's tokens in the token buffer, so each draft is written there before the
next one is drawn. It lies at or beyond the slot's counter, where the pass that verifies writes its drafts anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.gpu.step_buffers import PlacedRecords
from runner_svc.interface.launchers import SamplingLauncher
from runner_svc.sampling.sample_records import RECORD_WORDS, SAMPLE_RECORD

MOST_EXTRAS = 1 << 14
"""Ids of bias and min_tokens in one step. Of a step with more, drafts are drawn without adjustments."""


def record_word(name: str) -> int:
    """Returns the index of a field of 32 bits among a record's words."""
    fields = SAMPLE_RECORD.fields
    assert fields is not None
    return int(fields[name][1]) // 4


_ADJUSTED, _POSITION, _RESERVED, _SLOT = map(record_word, ("adjusted", "position", "reserved", "slot"))


class DraftDraws:
    """Records at fixed addresses, and draws with them inside captured passes."""

    def __init__(self, sampling: SamplingLauncher, num_slots: int, device: torch.device) -> None:
        """`sampling` writes what it draws into the token buffer, whose last row is the dummy slot's, `num_slots`."""

        def words(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._sampling, self._dummy = sampling, num_slots
        self._records = words(num_slots * RECORD_WORDS)
        self._extra_ids, self._extra_values = words(MOST_EXTRAS), words(MOST_EXTRAS)
        self._finite = words(num_slots).to(torch.uint8)
        self.tokens = words(num_slots)
        """The last draws, int32 [num_slots]; -1 where logits were not finite."""

    def take(self, records: PlacedRecords, packed: Tensor) -> None:
        """Copies the records of a pass's rows out of the step's input, `packed`."""
        own = records.records.tensor(packed)
        self._records[: len(own)] = own
        lines = self._records.view(-1, RECORD_WORDS)
        lines[:, _RESERVED] = 0
        if not records.adjusted:
            return
        ids, values = records.extra_ids.tensor(packed), records.extra_values.tensor(packed)
        if len(ids) > MOST_EXTRAS:
            lines[:, _ADJUSTED] = 0
            return
        self._extra_ids[: len(ids)] = ids
        self._extra_values[: len(values)] = values

    def draw(
        self, stream: int, logits: Tensor, slots: Tensor, positions: Tensor, fits: Tensor, proposals: Tensor
    ) -> None:
        """Draws the tokens at `positions` [R] of the rows that `fits` [R]; fills `proposals` [R], -1 for others.

        `logits`: float32 [R, vocab_size], changed in place. `slots`: int32 [R]. The tokens before each position are in
        the token buffer. Rows that do not fit are drawn for the dummy slot.
        """
        count = len(positions)
        lines = self._records.view(-1, RECORD_WORDS)[:count]
        lines[:, _POSITION] = positions * fits
        lines[:, _SLOT] = torch.where(fits, slots, self._dummy)
        tokens, finite = self.tokens[:count], self._finite[:count]
        records = self._records[: count * RECORD_WORDS]
        extras = self._extra_ids, self._extra_values
        self._sampling(stream, logits, records, *extras, tokens, finite, adjusted=True)
        proposals.copy_(torch.where(fits & (finite > 0), tokens, -1))
