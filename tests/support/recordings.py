"""Handwritten recordings of a roster: a line of text per step, a character per slot."""

from __future__ import annotations

from roster_client.timeline.recording import Recording, Row, RowKind, Step


def drawn(title: str, *lines: str, waiting: int = 0, step_s: float = 0.5, runner: str = "r", **words: str) -> Recording:
    """Makes a recording; each line is a step: "A" prefills 10 positions of request a, "a" decodes, "." is empty."""
    steps = []
    for index, line in enumerate(lines):
        rows = tuple(
            Row(slot, mark.lower(), RowKind.PREFILL if mark.isupper() else RowKind.DECODE, 10 if mark.isupper() else 1)
            for slot, mark in enumerate(line)
            if mark != "."
        )
        steps.append(Step(index + 1, runner, 2 + index * step_s, step_s, "fcfs", len(line), waiting, rows))
    return Recording(title, dict(words), steps)
