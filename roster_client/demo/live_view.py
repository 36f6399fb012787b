"""The demo on a terminal: answers on the left, the roster on the right, four frames per second.

Frames are drawn at a fixed rate from the current state, so that their cost does not grow with the number of steps:
drawing shares the machine's cores with the model.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from roster_client.demo.run import DemoAnswer, DemoRun, RosterChange
from roster_client.terminal.text import one_line

FRAMES_PER_S = 4
ROSTER_COLUMNS = 38
MAX_ROWS = 42
BAR_CELLS = 14
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green")


class LiveView:
    """Draws a run from `begin` to `end`; a `View`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def begin(self, run: DemoRun) -> None:
        """Starts drawing the run."""
        frame = _Frame(run, self._console)
        self._live = Live(
            console=self._console, get_renderable=frame.render, refresh_per_second=FRAMES_PER_S, screen=False
        )
        self._live.start()

    def step(self, run: DemoRun, change: RosterChange | None) -> None:
        """Does nothing: the next frame shows the step."""

    def text(self, answer: DemoAnswer) -> None:
        """Does nothing: the next frame shows the text."""

    def finished(self, answer: DemoAnswer) -> None:
        """Does nothing: the next frame shows the finished answer."""

    def end(self) -> None:
        """Stops drawing; the last frame stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Frame:
    def __init__(self, run: DemoRun, console: Console) -> None:
        self._run = run
        self._console = console

    def render(self) -> RenderableType:
        """Returns the current frame, as wide as the terminal and one line lower."""
        width, height = self._console.size
        lines = max(1, (min(height - 1, MAX_ROWS) - 2) // len(self._run.answers) - 1)
        rows = (lines + 1) * len(self._run.answers)
        columns = max(20, width - ROSTER_COLUMNS - 4)
        answers = Group(*[self._answer(answer, columns, lines) for answer in self._run.answers])
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(width=ROSTER_COLUMNS)
        grid.add_row(
            Panel(answers, title=f"answers, policy {self._run.name}", height=rows + 2),
            Panel(self._roster(rows), title="roster", height=rows + 2),
        )
        return grid

    def _answer(self, answer: DemoAnswer, columns: int, lines: int) -> RenderableType:
        if answer.finish is not None:
            state = f"done, {answer.num_tokens} tokens"
        else:
            state = "waiting" if answer.slot is None else f"slot {answer.slot}, {answer.num_tokens} tokens"
        question = one_line(answer.request.question)
        room = columns - cell_len(state) - 7
        question = question if len(question) <= room else question[: room - 1] + "…"
        heading = Text.assemble((f"#{answer.number} ", _colour(answer)), (question, "bold"), (f"  {state}", "dim"))
        body = _tail(answer.text, columns, lines)
        return Group(heading, *body, *[Text()] * (lines - len(body)))

    def _roster(self, lines: int) -> RenderableType:
        run = self._run
        rows: list[Text] = [Text(f"step {run.step}  batch {run.rows}/{run.slots}  {run.waiting} waiting"), Text()]
        for slot in range(run.slots):
            rows.append(_slot(slot, run.seated.get(slot)))
        rows.append(Text())
        for change in list(run.changes)[-max(0, lines - len(rows)) :]:
            rows.append(_change(change))
        return Group(*rows)


def _slot(slot: int, answer: DemoAnswer | None) -> Text:
    if answer is None:
        return Text(f"slot {slot} {'·' * BAR_CELLS} empty", style="dim")
    full = round(BAR_CELLS * min(1.0, answer.num_tokens / answer.request.max_tokens))
    bar = "█" * full + "░" * (BAR_CELLS - full)
    return Text.assemble(f"slot {slot} ", (bar, _colour(answer)), f" #{answer.number} {answer.num_tokens} tok")


def _change(change: RosterChange) -> Text:
    text = Text(f"{change.step:>5} ", style="dim", no_wrap=True, overflow="ellipsis")
    for number in change.joined:
        text.append(f" +#{number}", style="green")
    for number, reason in change.left:
        text.append(f" -#{number} {reason}", style="red")
    return text


def _tail(text: str, columns: int, lines: int) -> list[Text]:
    """Returns the last lines of an answer. Lines break at fixed places, so that they do not shift as it grows."""
    flat = one_line(text)
    first = max(0, -(-len(flat) // columns) - lines) * columns
    return [Text(flat[i : i + columns], no_wrap=True) for i in range(first, len(flat), columns)]


def _colour(answer: DemoAnswer) -> str:
    return _COLOURS[(answer.number - 1) % len(_COLOURS)]
