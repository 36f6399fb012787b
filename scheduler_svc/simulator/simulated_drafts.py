"""Drafts of simulated runners: how many tokens each sequence has, and which of its drafts are right.

A draft of a position is right with the probability of its place behind the last known token. The random number is keyed
by (seed, request, position), so it depends neither on the batch nor on the number of drafts, and each policy meets the
same text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roster_protos import engine_pb2, plan_pb2

Column = npt.NDArray[np.int64]


class WrongAcceptance(ValueError):
    """Shares of accepted drafts that are not between 0 and 1."""


@dataclass(slots=True, frozen=True)
class Run:
    """What a runner does with the rows of a plan; all columns are [R]."""

    slots: Column
    starts: Column
    """First position of each row, none of them -1."""
    counts: Column
    """Positions computed, drafted ones included."""
    drafted: Column
    """Drafted tokens that were verified."""
    first: Column
    """Position of the first token that the row samples."""
    token_counts: Column
    """Tokens sampled: 1 and the accepted drafts; 0 for a row that does not sample."""


class SimulatedDrafts:
    """Sequences of the runners with sessions 1 to `count`, each with `slots` slots.

    `acceptance`: share of the drafts that are right where all before them in the row are, by place; the last one counts
    for all later places. `of_requests`: the same of single requests, by id. At most `most` tokens of a row are drafted.
    """

    def __init__(
        self,
        count: int,
        slots: int,
        most: int,
        acceptance: Sequence[float],
        seed: int,
        of_requests: dict[str, tuple[float, ...]],
    ) -> None:
        """Raises WrongAcceptance."""
        self._most = most
        self._usual = _by_place(acceptance, most)
        self._own = {request_id: _by_place(shares, most) for request_id, shares in of_requests.items()}
        self._seed = seed
        self._known = np.zeros((count + 1, slots), np.int64)
        self._keys = np.zeros((count + 1, slots), np.uint64)
        self._shares = np.zeros((count + 1, slots, most))

    def run(self, session: int, plan: plan_pb2.Plan) -> Run:
        """Executes a plan after all earlier ones of its session."""
        known = self._known[session]
        for admission in plan.admissions:
            self._admit(session, admission)
        slots, starts, counts = (
            np.frombuffer(column, "<i4").astype(np.int64)
            for column in (plan.extent_slots, plan.extent_starts, plan.extent_counts)
        )
        sample = np.frombuffer(plan.extent_flags, np.uint8) == 1
        drafted = np.zeros(len(slots), np.int64)
        if plan.extent_drafts:
            drafted[:] = np.frombuffer(plan.extent_drafts, np.uint8)
        starts = np.where(starts < 0, known[slots] - 1, starts)
        first = starts + counts - drafted
        token_counts = np.where(sample, 1 + self._accepted(session, slots, first, drafted), 0)
        known[slots[sample]] = (first + token_counts)[sample]
        return Run(slots, starts, counts, drafted, first, token_counts)

    def _admit(self, session: int, admission: plan_pb2.Admission) -> None:
        slot, submit = admission.slot, engine_pb2.SequenceContext.FromString(admission.context).submit
        self._known[session, slot] = len(admission.tokens) // 4
        self._keys[session, slot] = zlib.crc32(f"{self._seed} {submit.request_id}".encode())
        self._shares[session, slot] = self._own.get(submit.request_id, self._usual)

    def _accepted(self, session: int, slots: Column, first: Column, drafted: Column) -> Column:
        """Returns the number of right drafts before the first wrong one; those of a row begin at `first`."""
        accepted, rows = np.zeros(len(slots), np.int64), drafted.nonzero()[0]
        if len(rows):
            places = np.arange(self._most)
            keys, shares = self._keys[session, slots[rows]], self._shares[session, slots[rows]]
            right = _uniform(keys[:, None], first[rows, None] + places) < shares
            right &= places < drafted[rows, None]
            accepted[rows] = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        return accepted


def _by_place(shares: Sequence[float], most: int) -> npt.NDArray[np.float64]:
    """Returns the shares [most]. Raises WrongAcceptance."""
    if not shares or not all(0 <= share <= 1 for share in shares):
        given = ", ".join(map(str, shares)) or "none"
        raise WrongAcceptance(f"the acceptance is a share from 0 to 1, or several, one for each place; got {given}")
    return np.array([shares[min(place, len(shares) - 1)] for place in range(most)])


def _uniform(keys: npt.NDArray[np.uint64], positions: Column) -> npt.NDArray[np.float64]:
    """Returns a random number in [0, 1) for each key and position: splitmix64 (Steele, Lea, Flood 2014)."""
    bits = (keys << np.uint64(32)) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)
