"""The stack of compose.yaml's CPU profile: started once and always removed afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.support.docker_stack import DockerStack
from tests.support.local_stack import LocalStack

DOCKER = os.environ.get("ROSTER_COMPOSE") == "docker"
PROFILE = "cpu"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerStack | LocalStack]:
    """In containers from freshly built images with ROSTER_COMPOSE=docker, otherwise as local processes."""
    folder = tmp_path_factory.mktemp("compose")
    stack: DockerStack | LocalStack
    if DOCKER:
        stack = DockerStack(folder, PROFILE)
        started = time.monotonic()
        stack.build()
        print(f"\nimages built in {time.monotonic() - started:.0f} s")
    else:
        stack = LocalStack(folder, PROFILE)
    try:
        stack.start()
        yield stack
        statuses = stack.stop()
        assert {statuses["scheduler"], statuses["runner-cpu"]} == {0}, stack.logs()
    finally:
        print(stack.logs())
        stack.remove()
