"""Estimates how long a sequence waits and runs, from recent service.

The model: a sequence keeps its slot for `prompt_s` per prompt token, and then for `token_s` per token until it has its
maximum, unless it ends early. The chance to end early is the same at each token, whatever the reason: a stop token, a
stop string, a cancellation, a deadline, an error. The chance that a waiting sequence gives up is the same in each
second. All four parameters are ratios of sums, so that they hold under any load:

    prompt_s = slot-seconds of rows that don't decode / known tokens of the sequences that took slots
    token_s  = slot-seconds of rows that decode       / their tokens, accepted drafts among them
    early    = ends in slots before the limit         / the same tokens
    give_up  = ends of waiting sequences              / seconds that all have waited

Slots become free as their sequences end. The first waiting sequences take them, and keep them for an average time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PACE_KEPT, ENDS_KEPT, LOAD_KEPT = 0.8, 0.98, 0.95
"""Factors by which evidence fades per second with results: durations follow the load, lengths the clients' habits."""
PRIOR_ENDS = 4.0
"""Early ends assumed beyond those observed: with little evidence, answers are assumed to be short."""
PRIOR_LOAD = 0.4
"""Load assumed before it is known."""
LONGEST_STEP_S = 5.0
"""A longer step is an outage and says nothing about the pace."""
LOAD_COUNTED = 0.7
"""Fraction of the load that counts: a fluctuating wait becomes short enough before its average does."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio, modulo 1, are spread evenly for any count."""

Numbers = npt.NDArray[np.float64]


class Work(NamedTuple):
    """Remaining work of some sequences, one entry each."""

    prompt: npt.NDArray[np.int64]
    """Known tokens that are not computed."""
    tokens: npt.NDArray[np.int64]
    """Maximum number of tokens that they may still sample."""


@dataclass
class ServiceRate:
    """The evidence, as fading sums, and the estimates derived from it. Times in seconds."""

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
    """Seconds waited by sequences that gave up."""
    arrived_slot_s: float = 0.0
    """Work accepted since the sums last faded, in slot-seconds divided by the number of slots."""
    load: float = PRIOR_LOAD
    """Fraction of the slots' time that new requests ask for."""
    at_s: float = 0.0
    faded_at: float = 0.0

    # ------------------------------------------------------------------ evidence

    def stepped(self, now_s: float, step_s: float, decoding: int, running: int, waiting: int) -> None:
        """Records a step of `decoding` decoding rows, of one token each, that took `step_s` seconds.

        `running` sequences have slots on its runner, and `waiting` wait for any.
        """
        if not self.at_s:  # after a takeover, the first interval includes the time without a scheduler
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

    def gained(self, accepted: int) -> None:
        """Records the tokens that the rows of the next step to be recorded had besides one each, because of drafts."""
        if self.at_s:
            self.tokens += accepted
            self.sampled += accepted

    def seated(self, known_tokens: int) -> None:
        """Records that a sequence with this many known tokens got a slot."""
        self.prompt_tokens += known_tokens

    def ended(self, *, in_slot: bool, early: bool, age_s: float = 0.0) -> None:
        """Records the end of a sequence `age_s` after its arrival; `early`: before its maximum number of tokens."""
        if not in_slot:
            self.gave_up += 1
            self.waited_in_vain_s += age_s
        elif early:
            self.ended_early += 1

    def accepted(self, work: Work, slots: int) -> None:
        """Records accepted sequences; `slots` is the number of slots of the service."""
        if self.known and slots:
            self.arrived_slot_s += float(self.hold_s(work).sum()) / slots

    def _fade(self, now_s: float) -> None:
        """Fades the sums. Idle seconds don't count; arrivals count up to the capacity, since a burst is not a rate."""
        seconds, self.faded_at = now_s - self.faded_at, now_s
        kept = LOAD_KEPT ** min(seconds, 60.0)
        self.load = self.load * kept + min(1.0, self.arrived_slot_s / seconds) * (1 - kept)
        self.arrived_slot_s = 0.0
        for name in ("tokens", "token_slot_s", "prompt_tokens", "prompt_slot_s"):
            setattr(self, name, getattr(self, name) * PACE_KEPT)
        for name in ("sampled", "ended_early", "gave_up", "waited_s", "waited_in_vain_s"):
            setattr(self, name, getattr(self, name) * ENDS_KEPT)

    # ------------------------------------------------------------------ estimates

    @property
    def known(self) -> bool:
        """Whether there is evidence for an estimate."""
        return self.tokens > 0

    @property
    def token_s(self) -> float:
        """Slot time per sampled token, in seconds: how long a decoding sequence takes for one token."""
        return self.token_slot_s / max(1.0, self.tokens)

    @property
    def prompt_s(self) -> float:
        """Slot time per prompt token, in seconds; tokens reused by a prefix hit count too."""
        return self.prompt_slot_s / max(1.0, self.prompt_tokens)

    @property
    def early(self) -> float:
        """The chance that a token is a sequence's last before its limit."""
        return (self.ended_early + PRIOR_ENDS) / max(1.0, self.sampled)

    def hold_s(self, work: Work) -> Numbers:
        """Returns the mean seconds for which each sequence keeps a slot."""
        return self.prompt_s * work.prompt - self.token_s * np.expm1(-self.early * work.tokens) / self.early

    def hold_at_s(self, work: Work, chance: float | Numbers) -> Numbers:
        """Returns the quantile `chance` of the seconds for which each sequence keeps a slot."""
        return self.prompt_s * work.prompt + self.token_s * np.minimum(work.tokens, -np.log1p(-chance) / self.early)

    def wait_s(self, running: Work, free: int, first: Work, ahead: int) -> float:
        """Returns the seconds until a sequence behind `ahead` others gets a slot; `first`: their first or a sample.

        `free` slots are free now, the others are those of `running`. Infinite if there is no slot.
        """
        joining = min(free, ahead, len(first.tokens))
        seated = Work(*(np.concatenate((now, new[:joining])) for now, new in zip(running, first, strict=True)))
        chances: Numbers = (np.arange(len(seated.tokens), dtype=np.float64) * _GOLDEN + 0.5) % 1.0  # spread evenly
        ends_s = np.sort(np.concatenate((np.zeros(free - joining), self._spread_s(seated, chances))))
        ahead, hold_s = ahead - joining, float(self.hold_s(first).mean()) if len(first.tokens) else 0.0
        if not len(ends_s):
            return math.inf
        slots = np.arange(1, len(ends_s) + 1)
        # When the first j freed slots, serving all sequences alone, would have been given out ahead + 1 times.
        turns_s = (hold_s * (ahead + 1 - slots) + np.cumsum(ends_s)) / slots
        wait_s = float(np.maximum(ends_s, turns_s).min())
        return self._shortened(wait_s)

    def _spread_s(self, seated: Work, chances: Numbers) -> Numbers:
        """Returns the seconds until each sequence leaves its slot at these chances.

        Scaled so that their sum is the mean, whichever sequence got which chance.
        """
        holds_s = self.hold_at_s(seated, chances)
        longer = float(self.hold_s(seated).sum()) / max(1e-9, float(holds_s.sum()))
        return np.minimum(holds_s * longer, self.prompt_s * seated.prompt + self.token_s * seated.tokens)

    def _shortened(self, wait_s: float) -> float:
        """Shortens the wait by the waiting sequences that give up.

        A queue of `wait_s` seconds loses the part `give_up` in each second, for `patience_s`, besides what is served.
        """
        if not self.gave_up or math.isinf(wait_s):
            return wait_s
        give_up, patience_s = self.gave_up / max(1.0, self.waited_s), self.waited_in_vain_s / self.gave_up
        left_s = (wait_s + 1 / give_up) * math.exp(-give_up * patience_s) - 1 / give_up
        return patience_s + left_s if left_s > 0 else math.log1p(give_up * wait_s) / give_up

    def until_shorter_s(self, seconds: float) -> float:
        """Returns the seconds until the wait is first shorter by `seconds`, at the present arrival rate."""
        return seconds / (1 - LOAD_COUNTED * self.load)
