"""Prints a streamed answer for `roster generate` and measures its times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from roster_client.client.events import Completion, Delta, Event, Finish, FinishReason, Usage
from roster_client.terminal.text import without_controls

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class AnswerPrinter:
    """Writes text as it arrives (`live`), or each choice when it ends; prints statistics to `notes` unless `quiet`."""

    def __init__(self, out: TextIO, notes: Console, *, live: bool, quiet: bool) -> None:
        self._out = out
        self._notes = notes
        self._live = live
        self._quiet = quiet
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._texts: dict[int, str] = {}

    def consume(self, events: Iterable[Event]) -> None:
        """Reads the stream to its end."""
        for event in events:
            if isinstance(event, Delta):
                self._delta(event)
            elif isinstance(event, Finish):
                self._finish(event)
            elif isinstance(event, Usage) and not self._quiet:
                self._statistics(event)

    def _delta(self, delta: Delta) -> None:
        if self._first_token is None:
            self._first_token = time.monotonic()
        if self._live:
            self._out.write(self._shown(delta.text))
            self._out.flush()
        else:
            self._texts[delta.index] = self._texts.get(delta.index, "") + delta.text

    def _finish(self, finish: Finish) -> None:
        if self._live:
            self._out.write("\n")
        else:
            self._out.write(f"── answer {finish.index} ──\n{self._shown(self._texts.get(finish.index, ''))}\n")
        self._out.flush()
        if finish.reason not in _WHOLE:
            reason = finish.reason.name.lower()
            text = f"The answer was cut short ({reason}){': ' + finish.message if finish.message else '.'}"
            self._notes.print(f"[red]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def _shown(self, text: str) -> str:
        """Returns the text unchanged for a pipe, without control characters for a terminal."""
        return without_controls(text) if self._out.isatty() else text

    def _statistics(self, usage: Usage) -> None:
        seconds = time.monotonic() - self._started
        first = (
            "no token" if self._first_token is None else f"first token after {self._first_token - self._started:.2f} s"
        )
        drafts = f", {usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted" if usage.drafted_tokens else ""
        self._notes.print(
            f"{usage.prompt_tokens} + {usage.completion_tokens} tokens in {seconds:.2f} s "
            f"({usage.completion_tokens / seconds:.1f} tokens/s), {first}{drafts}",
            style="dim",
            highlight=False,
        )


def is_whole(completion: Completion) -> bool:
    """Returns whether every choice ended by stop or length; False if one was cut short."""
    return all(choice.finish is not None and choice.finish.reason in _WHOLE for choice in completion.choices)


def completion_as_dict(completion: Completion) -> dict[str, Any]:
    """Returns the JSON object that `roster generate --json` prints."""
    usage = completion.usage
    return {
        "request_id": completion.request_id,
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish.reason.name.lower() if choice.finish else None,
                "stop_string": choice.finish.stop_string if choice.finish else None,
                "stop_token_id": choice.finish.stop_token_id if choice.finish else None,
            }
            for choice in completion.choices
        ],
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "numerics": usage.numerics,
        },
    }
