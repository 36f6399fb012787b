"""Comparison of both clients' numbers with each other and with the witnesses'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.client_agreement.clients import Answered
from bench.client_agreement.witness import Seen

BAR = 0.10
POINTS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p90": lambda values: float(np.percentile(values, 90)),
}
JUDGED = ("mean", "p50")
OURS, THEIRS = "ours", "guidellm"


@dataclass(frozen=True, slots=True)
class Side:
    """One client's counted requests, ordered by start, and its witness's record of the same requests."""

    answered: list[Answered]
    seen: list[Seen]

    @property
    def counts(self) -> dict[str, int]:
        return {"requests": len(self.answered), "output_tokens": sum(one.output_tokens for one in self.answered)}


def overlapping(
    ours: Sequence[Answered], our_seen: Sequence[Seen], theirs: Sequence[Answered], their_seen: Sequence[Seen]
) -> dict[str, Side]:
    """Returns, by client, the requests that began while both were sending. Raises ValueError if there are none."""
    both = (_in_order(ours, our_seen), _in_order(theirs, their_seen))
    begin_s = max(side.seen[0].start_s for side in both)
    end_s = min(side.seen[-1].start_s for side in both)
    cut = []
    for side in both:
        kept = [number for number, seen in enumerate(side.seen) if begin_s <= seen.start_s <= end_s and seen.text_s]
        cut.append(Side([side.answered[number] for number in kept], [side.seen[number] for number in kept]))
    if not all(side.answered for side in cut):
        raise ValueError("the clients never sent at the same time: choose more --requests")
    return dict(zip((OURS, THEIRS), cut, strict=True))


def _in_order(answered: Sequence[Answered], seen: Sequence[Seen]) -> Side:
    """Orders both by start, so that they match; drops requests that the client started last and did not count.

    Raises ValueError if the witness saw fewer requests than the client reports.
    """
    if len(seen) < len(answered):
        raise ValueError(f"the witness saw {len(seen)} requests, but the client reports {len(answered)}")
    by_start = sorted(seen, key=lambda one: one.start_s)[: len(answered)]
    return Side(sorted(answered, key=lambda one: one.began_s), by_start)


def compared(sides: Mapping[str, Side]) -> list[dict[str, Any]]:
    """Returns one row per measure and statistic, times in ms; `difference` is guidellm's / ours - 1.

    The clients' own TTFT and ITL decide the result; the wire's times and each client's excess over its wire are shown
    next to them.
    """
    measures: dict[str, Callable[[Side], list[float]]] = {
        "TTFT": lambda side: [one.ttft_s for one in side.answered],
        "ITL": lambda side: [one.itl_s for one in side.answered],
        "TTFT on the wire": lambda side: [one.ttft_s for one in side.seen],
        "TTFT above the wire": lambda side: [
            one.ttft_s - seen.ttft_s for one, seen in zip(side.answered, side.seen, strict=True)
        ],
    }
    rows = []
    for name, values in measures.items():
        for point, of in POINTS.items():
            here, there = (of(values(sides[side])) * 1e3 for side in (OURS, THEIRS))
            rows.append(
                {
                    "measure": f"{name} {point}",
                    "ours_ms": round(here, 2),
                    "guidellm_ms": round(there, 2),
                    "difference": round(there / here - 1, 4),
                    "judged": point in JUDGED and name in ("TTFT", "ITL"),
                }
            )
    return rows


def print_rows(rows: Sequence[Mapping[str, Any]], sides: Mapping[str, Side]) -> None:
    """Prints the table and the numbers of requests in it."""
    print(f"{'':26}{'ours, ms':>10}{'guidellm, ms':>14}{'difference':>12}")
    for row in rows:
        print(f"{row['measure']:26}{row['ours_ms']:>10.2f}{row['guidellm_ms']:>14.2f}{row['difference']:>+12.1%}")
    print({name: side.counts for name, side in sides.items()})
