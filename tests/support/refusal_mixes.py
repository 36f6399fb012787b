"""The clients' behaviour and the runners of a trial: each world is determined by its mix and its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

ENDS = ("length", "eos", "stop", "cancel", "disconnect", "error")


@dataclass(frozen=True, slots=True)
class Mix:
    """The clients' behaviour and the runners that serve them."""

    ends: dict[str, float]
    """Weight of each kind of end in `ENDS`; deadlines end requests of every kind."""
    runners: int = 1
    slots: int = 8
    blocks: int = 400
    """KV blocks of 8 tokens per runner; a small number causes preemptions."""
    load: float = 0.5
    """Load of single requests, as a fraction of the runners' capacity."""
    batch: int = 120
    """Largest number of requests in a batch; 0: no batches. The next one arrives some time after the last is done."""
    choices: int = 1
    policy: str = "fcfs"
    tenants: int = 1
    takeover_s: float = 0.0
    """Seconds between takeovers by a new scheduler; 0: none."""
    slack: tuple[float, float] = (2.0, 12.0)
    """Range of a deadline relative to the longest time that the request takes alone; uniform on a log scale."""


MIXES = {
    "length": Mix({"length": 1}),
    "eos": Mix({"eos": 1}),
    "stop": Mix({"stop": 1}),
    "cancel": Mix({"length": 0.4, "stop": 0.3, "cancel": 0.2, "disconnect": 0.1}),
    "all": Mix({"length": 0.3, "eos": 0.3, "stop": 0.2, "cancel": 0.1, "disconnect": 0.05, "error": 0.05}),
    "fleet": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, runners=3, batch=300),
    "choices": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, choices=3),
    "preemption": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, slots=16, blocks=90, load=0.3),
    "priority": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, policy="priority"),
    "fair": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, policy="fair", tenants=3),
    "takeover": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, takeover_s=12.0),
    "overload": Mix({"length": 0.3, "eos": 0.3, "stop": 0.3, "cancel": 0.1}, load=1.6, batch=0),
}

FORESEEABLE = [name for name in MIXES if name != "overload"]
"""Mixes whose load does not always exceed the capacity; an endless overload's end cannot be predicted."""

STEP_S, POSITION_S = 0.05, 0.0004
"""Seconds of a step, and seconds added for each position that it computes."""
MOST_TOKENS = 100
EOS = 1 / 30
MEAN_S = 40 * STEP_S
"""Mean time in a slot, approximately."""


@dataclass(slots=True)
class Wish:
    """One client's planned request."""

    at_s: float
    end: str
    prompt_len: int
    max_tokens: int
    timeout_ms: int | None
    cut_at: int | None = None
    """Number of tokens that complete a stop string."""
    leaves_s: float | None = None
    """Seconds after which the client leaves."""
    fails_at: int | None = None
    n: int = 1
    priority: int = 0
    tenant: str = ""
    number: int = 0
    """Number of its request; 0 until it is first sent."""
    first_id: str = ""
    """For a request that was refused before: its first id."""


def single_wishes(mix: Mix, seed: int, seconds: float) -> list[Wish]:
    """Returns the single requests that arrive within `seconds`, in order; most have a deadline."""
    rng = random.Random(f"{seed} single")
    rate = mix.load * mix.slots * mix.runners / MEAN_S / ((1 + mix.choices) / 2)
    wishes, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        wishes.append(_wish(mix, at_s, rng, rng.random() < 0.8))
        at_s += rng.expovariate(rate)
    return wishes


def batch_wishes(mix: Mix, seed: int, number: int, at_s: float) -> list[Wish]:
    """Returns a batch: many requests at once, without deadlines."""
    rng = random.Random(f"{seed} batch {number}")
    return [_wish(mix, at_s, rng, False) for _ in range(rng.randrange(mix.batch // 3, mix.batch + 1))]


def _wish(mix: Mix, at_s: float, rng: random.Random, in_time: bool) -> Wish:
    (end,) = rng.choices(list(mix.ends), list(mix.ends.values()))
    exact = end == "length"
    wish = Wish(
        at_s,
        end,
        prompt_len=min(100, 1 + int(rng.expovariate(1 / 20))),
        max_tokens=rng.randrange(5, 75) if exact else MOST_TOKENS,
        timeout_ms=None,
        n=rng.randrange(1, mix.choices + 1),
        priority=rng.choice((0, 0, 1)),
        tenant=f"t{rng.randrange(mix.tenants)}",
    )
    if end == "stop":
        wish.cut_at = min(MOST_TOKENS, 3 + int(rng.expovariate(1 / 35)))
    elif end in ("cancel", "disconnect"):
        wish.leaves_s = rng.expovariate(1 / 2)
    elif end == "error":
        wish.fails_at = rng.randrange(1, 40)
    if in_time:
        alone_s = (STEP_S + POSITION_S * mix.slots) * wish.max_tokens + 3 * STEP_S
        wish.timeout_ms = int(1000 * alone_s * mix.slack[0] * (mix.slack[1] / mix.slack[0]) ** rng.random())
    return wish
