"""Why the engine takes no request or call, for those who count."""

from __future__ import annotations

from enum import Enum


class RefusalReason(Enum):
    """The values are those of the label `reason`."""

    ID_IN_USE = "id_in_use"
    DRAINING = "draining"
    NO_RUNNER = "no_runner"
    TOO_LONG = "too_long"
    """No runner that is there can ever hold it."""
    TENANT_LIMIT = "tenant_limit"
    DEADLINE = "deadline"
    """It would end too late at the present load."""
    POLICY = "policy"
    QUEUE_FULL = "queue_full"
    SHED = "shed"
    """It waited, and was taken back for a request of a tenant that has less of a full queue."""
    CONSTRAINT = "constraint"
    """Its constraint can't be used."""
    CRASHES_RUNNERS = "crashes_runners"
