"""What a policy sees: read-only views of requests, sequences, load and results. Times in seconds, engine's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler_svc.policy.rank import Rank


@dataclass(slots=True, frozen=True)
class RequestView:
    """What a policy may know of a request."""

    request_id: str
    tenant: str
    arrival_s: float
    """Earlier than it was for a request that came back at the time that it had been told: its place in the line."""
    priority: int
    prompt_tokens: int
    max_tokens: int
    num_choices: int
    deadline_s: float | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None


class WaitingView(NamedTuple):
    """A waiting sequence. `tokens` are to be computed when it is seated; `cached` of them wait in the prefix cache of
    the runner that is being planned (0 where prefixes are not shared).

    A tuple, as are all that are made often: that costs a third of a frozen dataclass.
    """

    sequence_id: int
    request: RequestView
    rank: Rank
    tokens: int
    cached: int
    waited_s: float


class RunningView(NamedTuple):
    """A running sequence. `computed` positions are lost when it is preempted, `blocks` are won."""

    sequence_id: int
    request: RequestView
    rank: Rank
    computed: int
    generated: int
    blocks: int


class Load(NamedTuple):
    """State of one runner and of the shared queue when a step is planned.

    For `admit`, of all runners: sums, but for the queue, the largest block, the tightest target and the largest tile.
    A step is one runner's, so that estimates of steps, and `budget`, take `of_one_runner`.
    """

    running: int
    decoding: int
    slots: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    blocks: int
    block_size: int
    max_step_tokens: int
    now_s: float = 0.0
    context: int = 0
    """KV positions of the sequences that decode: what this step's attention reads for them."""
    prompt_backlog: int = 0
    """Positions that running sequences have still to compute of their prompts."""
    itl_target_s: float = math.inf
    """Tightest ITL target of the sequences that decode."""
    tile_tokens: int = 1
    """Steps take their time by tiles of so many positions: a tile that is not full takes as long."""
    runners: int = 1
    """How many the sums are of."""

    def of_one_runner(self) -> Load:
        """What each of the runners has if it is dealt out evenly, rounded down; the queue is that of all."""
        runners = self.runners
        if runners <= 1:
            return self
        return self._replace(
            running=self.running // runners,
            decoding=self.decoding // runners,
            slots=self.slots // runners,
            free_blocks=self.free_blocks // runners,
            blocks=self.blocks // runners,
            max_step_tokens=self.max_step_tokens // runners,
            context=self.context // runners,
            prompt_backlog=self.prompt_backlog // runners,
            runners=1,
        )


class Account(NamedTuple):
    """What one tenant was served since the engine started, and how far it was lifted (see `Policy.tenant_key`)."""

    prompt_tokens: int = 0
    """Prompt tokens computed for it (what the prefix cache spared is not charged)."""
    sampled_tokens: int = 0
    lift: float = 0.0


class LedgerView(Protocol):
    """What the engine knows over time, whatever the policy: the clock, and an account per tenant."""

    @property
    def now_s(self) -> float:
        """Now."""

    def account(self, tenant: str) -> Account:
        """The tenant's account; an empty one if it was never served."""


class FirstToken(NamedTuple):
    """A sequence has got its first token."""

    request: RequestView
    ttft_s: float


class Ended(NamedTuple):
    """A sequence has ended by itself."""

    request: RequestView
    generated: int


_NO_GAPS = np.zeros(0)
_NO_GAPS.setflags(write=False)


class StepReport(NamedTuple):
    """What a result told: for policies that learn. The step is the plan that this result answers."""

    now_s: float
    rows: int
    sampled: int
    round_trip_s: float
    """From the plan's departure to the result's arrival, waiting behind the plan before it included."""
    step_s: float = 0.0
    """What the step took of the runner's time: since the result before it, or since it was sent if that was later."""
    decode_rows: int = 0
    prefill_tokens: int = 0
    context: int = 0
    """KV positions before the decoding rows: what attention read for them."""
    tile_tokens: int = 1
    """Of the runner, see `Load`."""
    gaps_s: npt.NDArray[np.float64] = _NO_GAPS
    """Inter-token times that ended with this result, one per token that is not its sequence's first."""
    first_tokens: tuple[FirstToken, ...] = ()
    ended: tuple[Ended, ...] = ()
