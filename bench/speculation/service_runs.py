"""Answers prompts with both services, with and without a drafter; the scheduler decides what is drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import psutil

from roster_client import LLM


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
    """A model on the CPU of this machine, served until the end of a `with`.

    One with `draft` has that drafter, otherwise none.
    """

    def __init__(self, draft: str, max_drafts: int, model: str, slots: int, threads: int) -> None:
        before = set(_runners())
        settings: dict[str, Any] = {"draft": draft, "max_drafts": max_drafts, "slots": slots, "threads": threads}
        self._llm = LLM(model, device="cpu", **settings)
        (started,) = set(_runners()) - before
        self._runner, self._threads = psutil.Process(started), threads

    def answer(self, prompts: Sequence[str], rows: int, max_tokens: int, temperature: float) -> ServedAnswers:
        """Answers the prompts, `rows` at a time. With one thread, the clock is the CPU time of the runner."""
        made, began = ServedAnswers(), self._clock()
        for at in range(0, len(prompts), rows):
            group = list(prompts[at : at + rows])
            for answer in self._llm.generate(group, max_tokens=max_tokens, temperature=temperature, seed=1):
                made.tokens.append(list(answer.token_ids))
                if answer.usage is not None:
                    made.drafted += answer.usage.drafted_tokens
                    made.accepted += answer.usage.accepted_tokens
        made.seconds = self._clock() - began
        return made

    def _clock(self) -> float:
        if self._threads != 1:
            return time.perf_counter()
        times = self._runner.cpu_times()
        return float(times.user + times.system)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.close()


def _runners() -> list[int]:
    """Returns the ids of this process's runners."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any("roster-runner" in part or "runner_svc" in part for part in child.cmdline()):
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
