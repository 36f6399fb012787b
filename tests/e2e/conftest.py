from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from roster_protos import admin_pb2
from tests.support.idle import wait_idle_at

WaitIdle = Callable[[str], Awaitable[admin_pb2.GetStatusResponse]]


@pytest.fixture
def wait_idle() -> WaitIdle:
    """Waits until nothing waits, runs or holds a block at an admin address, and returns the status."""
    return wait_idle_at
