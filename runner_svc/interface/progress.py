"""The interface by which long start-up operations report progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the current operation and its completed share, 0 to 1."""
