"""What a GPU backend drafts with, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roster_common.link_protocol import GRAPH_DRAFTS, graph_drafts
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.interface.draft_launchers import DraftLaunchers, ProposeLauncher

MOST_SAMPLED = 1024
"""Most positions of a plan that are sampled, with many slots; their logits take memory."""


def _ngram(launchers: DraftLaunchers, slots: DeviceSlots) -> ProposeLauncher:
    return launchers.ngram


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The drafter of a backend."""

    name: str = "ngram"
    max_drafts: int = GRAPH_DRAFTS[-1]
    make: Callable[[DraftLaunchers, DeviceSlots], ProposeLauncher] = _ngram
    """Makes the launcher of the drafter; tests and benches have their own."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_drafts <= GRAPH_DRAFTS[-1]:
            raise ValueError(f"a GPU verifies 1 to {GRAPH_DRAFTS[-1]} drafts a row, not {self.max_drafts}")

    @property
    def strides(self) -> list[int]:
        """The positions of a row in captured steps, ascending. Others are padded to the next."""
        return [1 + drafts for drafts in graph_drafts(self.max_drafts)]

    @property
    def widest(self) -> int:
        """Positions of a row with the most drafts."""
        return 1 + self.max_drafts

    def most_sampled(self, num_slots: int, max_step_tokens: int) -> int:
        """Returns the most sampled positions of a plan."""
        return max(num_slots, min(num_slots * self.widest, MOST_SAMPLED, max_step_tokens))
