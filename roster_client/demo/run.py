"""State of a run of the demo: the answers so far, the slots' answers, and the measurements.

The views (`live_view.py`, `plain_view.py`) show it; `comparison.py` updates it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from roster_client.client.events import Delta, Finish, Usage
from roster_client.demo.prompts import DemoRequest
from roster_protos import admin_pb2

RECENT_CHANGES = 40


@dataclass(slots=True)
class DemoAnswer:
    """One request of the run; times are monotonic seconds."""

    request: DemoRequest
    number: int
    sent_s: float = 0.0
    first_token_s: float | None = None
    text: str = ""
    num_tokens: int = 0
    finish: Finish | None = None
    slot: int | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token; infinite if there was none."""
        return float("inf") if self.first_token_s is None else self.first_token_s - self.sent_s


@dataclass(frozen=True, slots=True)
class RosterChange:
    """A step at which sequences joined or left: their numbers, and the reason that each left."""

    step: int
    joined: tuple[int, ...]
    left: tuple[tuple[int, str], ...]
    rows: int
    slots: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run's row of the closing table."""

    name: str
    tokens: int
    seconds: float
    mean_ttft_s: float
    worst_ttft_s: float
    mean_rows: float
    slots: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class DemoRun:
    """A run of one policy, with drafts or without.

    Request ids are the answers' numbers, from 1; other requests (the warm-up) are ignored.
    """

    policy: str
    answers: list[DemoAnswer]
    drafts: bool = False
    """Whether the runner may draft tokens."""
    slots: int = 0
    rows: int = 0
    step: int = 0
    waiting: int = 0
    steps_seen: int = 0
    rows_seen: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seated: dict[int, DemoAnswer] = field(default_factory=dict)
    changes: deque[RosterChange] = field(default_factory=lambda: deque(maxlen=RECENT_CHANGES))

    @property
    def name(self) -> str:
        """The policy, and whether it drafts."""
        return f"{self.policy} + drafts" if self.drafts else self.policy

    def take_delta(self, answer: DemoAnswer, delta: Delta) -> None:
        """Adds a delta to its answer."""
        if answer.first_token_s is None:
            answer.first_token_s = time.monotonic()
        answer.text += delta.text
        answer.num_tokens += len(delta.token_ids)

    def take_finish(self, answer: DemoAnswer, finish: Finish) -> None:
        """Ends an answer and frees its slot; after the last answer, no step may follow to report that it left."""
        answer.finish = finish
        self._unseat(answer.number)

    def take_usage(self, usage: Usage) -> None:
        """Adds the drafts of an answer that has ended."""
        self.drafted_tokens += usage.drafted_tokens
        self.accepted_tokens += usage.accepted_tokens

    def take_step(self, report: admin_pb2.WatchStepsResponse) -> RosterChange | None:
        """Takes a step's report; returns the change if a sequence joined or left."""
        self.step, self.slots, self.waiting, self.rows = report.number, report.slots, report.waiting, len(report.rows)
        ours = sum(self._answer_of(row.sequence.request_id) is not None for row in report.rows)
        if ours:
            self.steps_seen += 1
            self.rows_seen += len(report.rows)
        left = tuple(
            (answer.number, leave.reason)
            for leave in report.left
            if (answer := self._answer_of(leave.sequence.request_id)) is not None
        )
        for number, _ in left:
            self._unseat(number)
        joined = []
        for reference in report.joined:
            answer = self._answer_of(reference.request_id)
            if answer is not None:
                self.seated[reference.slot] = answer
                answer.slot = reference.slot
                joined.append(answer.number)
        if not joined and not left:
            return None
        change = RosterChange(report.number, tuple(joined), left, len(report.rows), report.slots, report.waiting)
        self.changes.append(change)
        return change

    def measure(self, seconds: float) -> Measurement:
        """Returns the measurements of a run that took `seconds`."""
        ttfts = [answer.ttft_s for answer in self.answers]
        return Measurement(
            self.name,
            sum(answer.num_tokens for answer in self.answers),
            seconds,
            sum(ttfts) / len(ttfts),
            max(ttfts),
            self.rows_seen / max(1, self.steps_seen),
            self.slots,
            self.drafted_tokens,
            self.accepted_tokens,
        )

    def _answer_of(self, request_id: str) -> DemoAnswer | None:
        number = int(request_id) if request_id.isdecimal() else 0
        return self.answers[number - 1] if 1 <= number <= len(self.answers) else None

    def _unseat(self, number: int) -> None:
        answer = self.answers[number - 1]
        if answer.slot is not None:
            self.seated.pop(answer.slot, None)
            answer.slot = None


def new_run(policy: str, requests: Sequence[DemoRequest], drafts: bool = False) -> DemoRun:
    """Returns a run that has not begun."""
    return DemoRun(policy, [DemoAnswer(request, number) for number, request in enumerate(requests, 1)], drafts)
