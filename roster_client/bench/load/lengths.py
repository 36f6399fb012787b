"""Distributions of prompt and output lengths, as given in options: `128`, `uniform:16-256`, `lognormal:200,1.2`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 1_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of tokens, at least 1."""

    text: str
    """The option's text, for reports."""
    sample: Callable[[random.Random], float]

    def draw(self, rng: random.Random) -> int:
        """Returns one length."""
        return min(LONGEST, max(1, round(self.sample(rng))))

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses `N` (always N), `uniform:A-B` (A to B inclusive), `exponential:MEAN` or `lognormal:MEDIAN,SIGMA`.

        Raises ValueError for anything else.
        """
        kind, _, rest = text.partition(":")
        try:
            return cls(text, _sampler(kind, rest))
        except (ValueError, KeyError):
            raise ValueError(
                f"{text!r} is not a length distribution: use N, uniform:MIN-MAX, exponential:MEAN or "
                "lognormal:MEDIAN,SIGMA, for example lognormal:200,1.2"
            ) from None


def _sampler(kind: str, rest: str) -> Callable[[random.Random], float]:
    match kind:
        case "uniform":
            low, high = map(int, rest.split("-"))
            if not 1 <= low <= high:
                raise ValueError
            return lambda rng: rng.randint(low, high)
        case "exponential":
            mean = _positive(rest)
            return lambda rng: rng.expovariate(1 / mean)
        case "lognormal":
            median, sigma = map(_positive, rest.split(","))
            return lambda rng: rng.lognormvariate(math.log(median), sigma)
        case _:
            if rest:
                raise ValueError
            fixed = int(kind)
            if fixed < 1:
                raise ValueError
            return lambda rng: fixed


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value
