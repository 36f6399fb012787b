"""Logging of the services: structlog, as console lines or as JSON."""

from __future__ import annotations

import logging
import os
from typing import Literal

import structlog

from roster_common.std_streams import forgiving_stderr
from roster_common.unknown_settings import UNKNOWN, unknown_variables


def configure_logs(log_format: Literal["console", "json"], level: Literal["debug", "info", "warning", "error"]) -> None:
    """Configures structlog for the process: one line per event on stderr, with UTC timestamps.

    A line that can't be written, because the disk is full or stderr is closed, is lost.
    """
    stderr = forgiving_stderr()
    renderer: structlog.typing.Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stderr.isatty(),
            # The default tracebacks show local variables, which may contain a user's prompt.
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
        logger_factory=structlog.WriteLoggerFactory(file=stderr),
    )


def warn_unknown() -> None:
    """Logs the `ROSTER_*` variables that nothing reads, in one warning."""
    if unknown := unknown_variables(os.environ):
        structlog.get_logger().warning(UNKNOWN, variables=unknown)
