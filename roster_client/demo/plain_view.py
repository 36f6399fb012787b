"""The demo as lines, for pipes and logs: every change of the roster, and the answers line by line."""

from __future__ import annotations

from rich.console import Console

from roster_client.demo.run import DemoAnswer, DemoRun, RosterChange
from roster_client.terminal.text import one_line

PIECE_CHARACTERS = 72


class PlainView:
    """Prints events as they happen; a `View`. Consecutive steps with an unchanged roster are one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[int, int] = {}
        self._last: RosterChange | None = None

    def begin(self, run: DemoRun) -> None:
        """Prints the run's policy."""
        self._printed = {answer.number: 0 for answer in run.answers}
        self._last = None
        self._line(f"--- policy {run.name}: {len(run.answers)} prompts at once")

    def step(self, run: DemoRun, change: RosterChange | None) -> None:
        """Prints the change, if any."""
        if change is None:
            return
        self._unchanged(change.step)
        parts = [f"joined #{number}" for number in change.joined]
        parts += [f"left #{number} ({reason})" for number, reason in change.left]
        bar = "█" * change.rows + "·" * max(0, change.slots - change.rows)
        self._line(
            f"step {change.step}: [{bar}] {change.rows}/{change.slots}, {', '.join(parts)}; {change.waiting} wait"
        )
        self._last = change

    def text(self, answer: DemoAnswer) -> None:
        """Prints the answer's new text in pieces of a line."""
        pending = answer.text[self._printed[answer.number] :]
        while len(pending) > PIECE_CHARACTERS:
            cut = pending.rfind(" ", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
            self._piece(answer, pending[:cut])
            pending = pending[cut:]

    def finished(self, answer: DemoAnswer) -> None:
        """Prints the rest of the answer and its measurements."""
        self._piece(answer, answer.text[self._printed[answer.number] :])
        reason = answer.finish.reason.name.lower() if answer.finish else "failed"
        self._line(f"  #{answer.number} done ({reason}): {answer.num_tokens} tokens, first after {answer.ttft_s:.2f} s")

    def end(self) -> None:
        """Does nothing."""

    def _unchanged(self, step: int) -> None:
        first = self._last.step + 1 if self._last is not None else step
        if first < step:
            steps = f"step {first}" if first == step - 1 else f"steps {first}-{step - 1}"
            self._line(f"{steps}: roster unchanged")

    def _piece(self, answer: DemoAnswer, piece: str) -> None:
        self._printed[answer.number] += len(piece)
        if shown := one_line(piece):
            self._line(f"  #{answer.number} │ {shown}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
