"""The drafter that knows certain texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.common.certain_text import SuccessorDrafts

VOCAB, SHIFT, LENGTH = 101, 7, 4000


def drafts(right: float, places: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the proposals of rows at many positions of two slots, and what follows there."""
    text = (torch.arange(LENGTH) * SHIFT % VOCAB).int()
    slots: Any = SimpleNamespace(tokens=text.repeat(2, 1), counters=torch.zeros(2, dtype=torch.int32))
    made, wanted = [], []
    for known in range(1, LENGTH - places, 50):
        slots.counters[:] = known
        ids = torch.tensor([1, 0], dtype=torch.int32)
        rows: Any = SimpleNamespace(slots=ids, starts=-torch.ones(2), counts=torch.full((2,), 1 + places))
        proposals = torch.zeros(2, places, dtype=torch.int32)
        SuccessorDrafts(slots, SHIFT, VOCAB, right)(0, rows, proposals)
        made.append(proposals)
        wanted.append(text[known : known + places].repeat(2, 1))
    return torch.cat(made), torch.cat(wanted)


def test_drafts_are_right_with_the_given_probability() -> None:
    for right in (0.0, 1.0):
        made, wanted = drafts(right)
        assert ((made == wanted).float().mean().item()) == right
    made, wanted = drafts(0.7)
    equal = (made == wanted).float()
    assert equal.mean().item() == pytest.approx(0.7, abs=0.06)
    both = (equal[:, 1:] * equal[:, :-1]).mean().item()
    assert both == pytest.approx(0.49, abs=0.08), "neighbours depend on each other"


def test_rows_get_as_many_as_they_want() -> None:
    slots: Any = SimpleNamespace(tokens=torch.zeros(3, 9, dtype=torch.int32), counters=torch.ones(3, dtype=torch.int32))
    starts, counts = torch.tensor([-1, 4, -1]), torch.tensor([3, 3, 1])
    rows: Any = SimpleNamespace(slots=torch.arange(3, dtype=torch.int32), starts=starts, counts=counts)
    proposals = torch.zeros(3, 3, dtype=torch.int32)
    SuccessorDrafts(slots, SHIFT, VOCAB, 1.0)(0, rows, proposals)
    assert proposals.tolist() == [[7, 14, -1], [-1, -1, -1], [-1, -1, -1]]
