"""Type checkers of those who import us see our types (PEP 561): backends the client, authors the policy interface."""

from __future__ import annotations

from importlib.resources import files

import pytest


@pytest.mark.parametrize("package", ["roster_client", "roster_protos", "roster_common", "scheduler_svc"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert files(package).joinpath("py.typed").is_file()
