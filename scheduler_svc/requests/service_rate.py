"""How long a sequence waits and takes, from what the service has done lately.

The model: a sequence holds its slot for `prompt_s` a prompt token, and then for `token_s` a token until it has as many
as it may have, unless it ends early. With each token it ends early with the same chance, whatever the reason: a stop
token, a stop string, a cancel, a deadline, an error. A sequence that waits gives up with the same chance in each
second. All four are ratios of sums, so that they hold under any load:

    prompt_s = slot-seconds of rows that don't decode / known tokens of the sequences that took slots
    token_s  = slot-seconds of rows that decode       / their tokens
    early    = ends in slots before the limit         / the same tokens
    give_up  = ends of sequences that wait            / seconds that all have waited

Slots become free as their sequences end. Those that go first take them, and hold them for an average time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PACE_KEPT, ENDS_KEPT, LOAD_KEPT = 0.8, 0.98, 0.95
"""What is left of evidence after a second with results: times follow the load, lengths are the clients' habit."""
PRIOR_ENDS = 4.0
"""Early ends that are believed unseen: while little is known, answers are thought to be short."""
PRIOR_LOAD = 0.4
"""What is thought of the load before it is known."""
LONGEST_STEP_S = 5.0
"""A longer one is an outage, not a pace."""
LOAD_COUNTED = 0.7
"""The wait goes up and down: it is short enough for the first time before it is so on average."""
_GOLDEN = (math.sqrt(5) - 1) / 2

Numbers = npt.NDArray[np.float64]


class Work(NamedTuple):
    """What some sequences have before them, an entry each."""

    prompt: npt.NDArray[np.int64]
    """Known tokens that are not computed."""
    tokens: npt.NDArray[np.int64]
    """Most tokens that they may still sample."""


@dataclass
class ServiceRate:
    """The evidence, as sums that fade, and what follows from it. Times in seconds."""

    tokens: float = 0.0
    token_slot_s: float = 0.0
    prompt_tokens: float = 0.0
    prompt_slot_s: float = 0.0
    sampled: float = 0.0
    """`tokens`, but fading as slowly as the ends."""
    ended_early: float = 0.0
    gave_up: float = 0.0
    waited_s: float = 0.0
    waited_in_vain_s: float = 0.0
    """By those that gave up."""
    arrived_slot_s: float = 0.0
    """Work that was accepted since the sums last faded, over the number of slots."""
    load: float = PRIOR_LOAD
    """The part of the slots' time that new requests ask for."""
    at_s: float = 0.0
    faded_at: float = 0.0

    # ------------------------------------------------------------------ evidence

    def stepped(self, now_s: float, step_s: float, decoding: int, running: int, waiting: int) -> None:
        """A step of `decoding` decoding rows has ended after `step_s` seconds; `running` sequences have slots on its
        runner, and `waiting` wait for any."""
        if not self.at_s:  # of a scheduler that has just taken over it holds the time without one
            self.at_s = self.faded_at = now_s
            return
        if now_s - self.faded_at >= 1.0:
            self._fade(now_s)
        step_s = min(step_s, LONGEST_STEP_S)
        self.tokens += decoding
        self.sampled += decoding
        self.token_slot_s += decoding * step_s
        if running > decoding:
            self.prompt_slot_s += (running - decoding) * step_s
        if waiting:
            self.waited_s += waiting * min(now_s - self.at_s, LONGEST_STEP_S)
        self.at_s = now_s

    def seated(self, known_tokens: int) -> None:
        """A sequence of so many known tokens has got a slot."""
        self.prompt_tokens += known_tokens

    def ended(self, *, in_slot: bool, early: bool, age_s: float = 0.0) -> None:
        """A sequence has ended so long after it came; `early`: before it had as many tokens as it may have."""
        if not in_slot:
            self.gave_up += 1
            self.waited_in_vain_s += age_s
        elif early:
            self.ended_early += 1

    def accepted(self, work: Work, slots: int) -> None:
        """Sequences were accepted; `slots` are all slots of the service."""
        if self.known and slots:
            self.arrived_slot_s += float(self.hold_s(work).sum()) / slots

    def _fade(self, now_s: float) -> None:
        """Idle seconds don't count. A burst is not a rate: what a second brings counts up to what it can serve."""
        seconds, self.faded_at = now_s - self.faded_at, now_s
        kept = LOAD_KEPT ** min(seconds, 60.0)
        self.load = self.load * kept + min(1.0, self.arrived_slot_s / seconds) * (1 - kept)
        self.arrived_slot_s = 0.0
        for name in ("tokens", "token_slot_s", "prompt_tokens", "prompt_slot_s"):
            setattr(self, name, getattr(self, name) * PACE_KEPT)
        for name in ("sampled", "ended_early", "gave_up", "waited_s", "waited_in_vain_s"):
            setattr(self, name, getattr(self, name) * ENDS_KEPT)

    # ------------------------------------------------------------------ what follows

    @property
    def known(self) -> bool:
        """There is evidence for an estimate."""
        return self.tokens > 0

    @property
    def token_s(self) -> float:
        """Seconds a token."""
        return self.token_slot_s / max(1.0, self.tokens)

    @property
    def prompt_s(self) -> float:
        """Seconds a prompt token. Those that a prefix hit spares are counted too."""
        return self.prompt_slot_s / max(1.0, self.prompt_tokens)

    @property
    def early(self) -> float:
        """The chance that a token is a sequence's last before its limit."""
        return (self.ended_early + PRIOR_ENDS) / max(1.0, self.sampled)

    def hold_s(self, work: Work) -> Numbers:
        """Seconds for which each holds a slot, on average."""
        return self.prompt_s * work.prompt - self.token_s * np.expm1(-self.early * work.tokens) / self.early

    def hold_at_s(self, work: Work, chance: float | Numbers) -> Numbers:
        """Seconds for which each holds a slot, where it is shorter with this chance."""
        return self.prompt_s * work.prompt + self.token_s * np.minimum(work.tokens, -np.log1p(-chance) / self.early)

    def wait_s(self, running: Work, free: int, first: Work, ahead: int) -> float:
        """Seconds until a sequence gets a slot behind `ahead` others, of which `first` are the first or a sample.

        `free` slots are free now, the others are those of `running`. Infinite where there is no slot.
        """
        joining = min(free, ahead, len(first.tokens))
        seated = Work(*(np.concatenate((now, new[:joining])) for now, new in zip(running, first, strict=True)))
        chances: Numbers = (np.arange(len(seated.tokens), dtype=np.float64) * _GOLDEN + 0.5) % 1.0  # spread evenly
        ends_s = np.sort(np.concatenate((np.zeros(free - joining), self._spread_s(seated, chances))))
        ahead, hold_s = ahead - joining, float(self.hold_s(first).mean()) if len(first.tokens) else 0.0
        if not len(ends_s):
            return math.inf
        slots = np.arange(1, len(ends_s) + 1)
        # By when the first j slots to become free, had they to serve all alone, have been given out ahead + 1 times.
        turns_s = (hold_s * (ahead + 1 - slots) + np.cumsum(ends_s)) / slots
        wait_s = float(np.maximum(ends_s, turns_s).min())
        return self._shortened(wait_s)

    def _spread_s(self, seated: Work, chances: Numbers) -> Numbers:
        """Seconds until each leaves its slot at these chances: all of them together as long as on average, so that the
        sum doesn't depend on which got which chance."""
        holds_s = self.hold_at_s(seated, chances)
        longer = float(self.hold_s(seated).sum()) / max(1e-9, float(holds_s.sum()))
        return np.minimum(holds_s * longer, self.prompt_s * seated.prompt + self.token_s * seated.tokens)

    def _shortened(self, wait_s: float) -> float:
        """The wait, as some of those that go first give up: a queue of `wait_s` seconds loses `give_up` of it in each
        second, for `patience_s`, besides what is served."""
        if not self.gave_up or math.isinf(wait_s):
            return wait_s
        give_up, patience_s = self.gave_up / max(1.0, self.waited_s), self.waited_in_vain_s / self.gave_up
        left_s = (wait_s + 1 / give_up) * math.exp(-give_up * patience_s) - 1 / give_up
        return patience_s + left_s if left_s > 0 else math.log1p(give_up * wait_s) / give_up

    def until_shorter_s(self, seconds: float) -> float:
        """Seconds until the wait is first shorter by so many, while new requests come as they do."""
        return seconds / (1 - LOAD_COUNTED * self.load)
