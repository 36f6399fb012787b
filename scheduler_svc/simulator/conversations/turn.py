"""A request's place in a conversation: what must end before it, which context it extends, and its hints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Turn:
    """A turn of a conversation.

    Its prompt is the prompt and the output of the request `continues` (its index in the trace), as the engine produced
    it, followed by `parts`. Without `continues` it is `parts` alone. A part is a content id below 2^41 and a number of
    tokens below 2^20; equal ids are equal tokens.
    """

    conversation: str
    parts: tuple[tuple[int, int], ...]
    continues: int | None = None
    after: tuple[int, ...] = ()
    """Indices of the requests that must have ended. The turn arrives `pause_s` after the last of these ends; without
    any, at the trace's arrival time."""
    pause_s: float = 0.0
    next_turn_s: float | None = None
    """When its client expects to come back, in seconds after its end (a hint; None: not told)."""
    retain_s: float | None = None
    """How long its client asks to keep its prefix, in seconds after its end (a hint; None: not told)."""
