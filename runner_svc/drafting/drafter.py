"""The interface of a drafter on the CPU: it proposes tokens that the model then verifies.

What it proposes never changes a text: a proposal is kept only where it equals the token that the model draws there. So
a drafter may guess in any way, but it must not read the token buffer at or beyond a slot's counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.step import StepBatch

if TYPE_CHECKING:
    from torch import Tensor


class Drafter(Protocol):
    """Proposes the next tokens of sequences."""

    name: str
    """As the setting `draft` names it."""

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Returns the proposals, int32 [L, max(most)], a row's own first and -1 behind them.

        `tokens`: the token buffer [slots + 1, context_length]. `slots` [L], `counters` [L]: number of known tokens of
        each; only `tokens[slot, :counter]` may be read. `most` [L]: maximum number of proposals of each row, >= 0.
        """


def no_proposals(most: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns proposals of none for `most` [L]: int32 [L, max(most)] of -1, which `Drafter.propose` fills in."""
    return np.full((len(most), int(most.max(initial=0))), -1, np.int32)


@runtime_checkable
class SlotDrafter(Drafter, Protocol):
    """A drafter that keeps state of its own for each slot or block."""

    def change(self, changes: SlotChanges, tables: NDArray[np.int32]) -> None:
        """Follows admissions, then appends.

        `tables` [slots + 1, W]: the block tables after the changes; the backend's own array, which stays the same.
        """

    def settle(self, slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        """Notes that the drafts of `slots` [L] were accepted or not: `counters` [L] tokens of each are known now."""

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies what it keeps of whole blocks; all sources are read before any target is written."""

    def forget_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Forgets what it keeps of blocks: the model's KV in them was computed by no step that it saw."""


@runtime_checkable
class HiddenDrafter(SlotDrafter, Protocol):
    """A drafter that reads the model's own states, which come with the steps that the model computes anyway."""

    max_drafts: int
    """Most tokens that it proposes for a row."""

    def observe(self, slots: NDArray[np.int32], counters: NDArray[np.int32], states: Tensor) -> None:
        """Takes the states from which the last known tokens were drawn, after a step has drawn and accepted them.

        `counters` [L]: number of known tokens of `slots` [L]. `states`: float32 [L, hidden_size] after the final norm,
        of the position before each slot's last known token.
        """


@runtime_checkable
class FollowingDrafter(SlotDrafter, Protocol):
    """A drafter that reads the model's states at all positions."""

    def follow(self, batch: StepBatch, hidden: Tensor) -> None:
        """Takes the hidden states [T, hidden_size] of a gathered batch, right after the model has computed them."""

    def kept_by_block(self) -> list[Tensor]:
        """Returns what it keeps under the model's block ids, each [parts, positions of the cache, ...].

        It travels with the model's KV to the host pool and back, as only the model's own steps could compute it again.
        """


@runtime_checkable
class LateDrafter(SlotDrafter, Protocol):
    """A drafter whose rows may have to catch up, over several steps, before they draft."""

    def catch_up(self, tokens: NDArray[np.int32], slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        """Goes on with what it began when `slots` [L] were to draft; called in steps in which rows only decode.

        `tokens`, `counters`: as those of `propose`.
        """
