"""Exit statuses of the `roster` command."""

from __future__ import annotations

from enum import IntEnum

from roster_client.client.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RosterError,
    UnavailableError,
)


class ExitCode(IntEnum):
    """Exit statuses; `EXPLANATION` documents them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    REFUSED = 4
    INCOMPLETE = 5
    INTERRUPTED = 130


EXPLANATION = (
    "Exit status: 0 success, 1 failure, 2 usage error, 3 no server or not ready, 4 request refused, "
    "5 the answer was cut short (cancelled, deadline, error) or requests of a batch failed, 130 interrupted."
)


def exit_code_for(error: RosterError) -> ExitCode:
    """Returns the exit status of a command that failed with this error."""
    if isinstance(error, UnavailableError):
        return ExitCode.UNAVAILABLE
    if isinstance(error, InvalidRequestError | NotFoundError | OverloadedError):
        return ExitCode.REFUSED
    return ExitCode.FAILED
