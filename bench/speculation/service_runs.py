"""Answers prompts with both services, with and without a drafter; the scheduler decides what is drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from roster_client import LLM

if TYPE_CHECKING:
    import psutil


@dataclass
class ServedAnswers:
    """The answers to some prompts, the drafts of all of them, and the time in seconds."""

    tokens: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


class Served:
    """A model on this machine, served until the end of a `with`.

    One with `draft` has that drafter, otherwise none.
    """

    def __init__(self, draft: str, max_drafts: int, model: str, slots: int, threads: int, device: str = "cpu") -> None:
        settings: dict[str, Any] = {"draft": draft, "max_drafts": max_drafts, "slots": slots}
        self.speculates = True
        """Whether requests let it draft."""
        self._runner: psutil.Process | None = None
        if device != "cpu":
            self._llm = LLM(model, device=device, **settings)
            return
        before = {child.pid for child in _runners()}
        self._llm = LLM(model, device=device, threads=threads, **settings)
        (started,) = (child for child in _runners() if child.pid not in before)
        if threads == 1:
            self._runner = started

    def forbidding(self) -> Self:
        """Returns the same service for requests that forbid drafts."""
        other = copy(self)
        other.speculates = False
        return other

    def answer(self, prompts: Sequence[str], rows: int, max_tokens: int, temperature: float) -> ServedAnswers:
        """Answers the prompts, `rows` at a time. With one thread, the clock is the CPU time of the runner."""
        made, began = ServedAnswers(), self._clock()
        for at in range(0, len(prompts), rows):
            group = list(prompts[at : at + rows])
            answers = self._llm.generate(
                group, max_tokens=max_tokens, temperature=temperature, seed=1, speculate=self.speculates
            )
            for answer in answers:
                made.tokens.append(list(answer.token_ids))
                if answer.usage is not None:
                    made.drafted += answer.usage.drafted_tokens
                    made.accepted += answer.usage.accepted_tokens
        made.seconds = self._clock() - began
        return made

    def _clock(self) -> float:
        if self._runner is None:
            return time.perf_counter()
        times = self._runner.cpu_times()
        return float(times.user + times.system)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.close()


def _runners() -> list[psutil.Process]:
    """Returns this process's runners."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any("roster-runner" in part or "runner_svc" in part for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
