"""Tries grammars in a separate process, which they may crash: `llguidance` is native code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one constraint; exactly one attribute is set."""

    refused: str | None = None
    """Why the constraint is refused."""
    accepted: list[bool] | None = None
    """For each probe, whether the grammar accepts the whole text."""
    died: int | None = None
    """Exit status of the process that the constraint crashed; negative: a signal."""


class GrammarTrials:
    """One process, restarted after a crash.

    with GrammarTrials() as trials:
        trials.run("regex", "a+", probes=["a", "b"])
    """

    def __init__(self, *, raw: bool = False) -> None:
        """`raw`: without the check of literals."""
        self._raw = raw
        self._process: subprocess.Popen[str] | None = None
        self.deaths = 0

    def run(self, kind: str, text: str, probes: list[str] | None = None, steps: int = 0, seed: int = 0) -> Trial:
        """Compiles a constraint, tests each probe, then draws up to `steps` tokens at random."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        case: dict[str, Any] = {"kind": kind, "text": text, "probes": probes or [], "steps": steps, "seed": seed}
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return Trial(**json.loads(answer))
        self.deaths += 1
        self._process = None
        process.stdout.close()
        return Trial(died=process.wait())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.grammar_trial_process", *(["raw"] if self._raw else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
