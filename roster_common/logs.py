"""Log lines of a service: structlog, as a person's console lines or as JSON.

A service imports this before anything else that imports structlog: where `rich` is installed structlog imports it, for
a tenth of a second of each process's start, and uses it for tracebacks that are not wanted here (see below).
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

_HIDES_RICH = "rich" not in sys.modules
if _HIDES_RICH:
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's way to say that there is none
try:
    import structlog
finally:
    if _HIDES_RICH:
        del sys.modules["rich"]


def configure_logs(log_format: Literal["console", "json"], level: Literal["debug", "info", "warning", "error"]) -> None:
    """Sets up structlog for the process: one line per event on stderr, UTC time stamps."""
    renderer: structlog.typing.Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The prettier tracebacks show local variables, and those may hold somebody's prompt.
            exception_formatter=structlog.dev.plain_traceback,
        )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if log_format == "json" else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
