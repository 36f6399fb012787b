"""A link whose clock only the test advances."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from scheduler_svc.link.runner_link import RunnerLink
from tests.support.fake_runner import Clock

SILENCE_S = 5.0
PLAN_S = 20.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def context() -> Iterator[zmq.Context]:  # type: ignore[type-arg]
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def link(context: zmq.Context, clock: Clock) -> RunnerLink:  # type: ignore[type-arg]
    return RunnerLink(context, "tcp://127.0.0.1:*", silence_s=SILENCE_S, plan_timeout_s=PLAN_S, clock=clock)
