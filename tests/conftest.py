"""What holds for all tests: property tests are bounded by pytest's timeout, not by the time of one example.

CI machines are shared, and an example that takes 10 ms alone takes 300 ms beside a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command called in this process configures the logs, on the stderr that pytest closes after the test."""
    yield
    structlog.reset_defaults()
