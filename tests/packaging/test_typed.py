"""Type checkers see the packages' types (PEP 561): the client for backends, the policy interface for authors."""

from __future__ import annotations

from importlib.resources import files

import pytest


@pytest.mark.parametrize("package", ["roster_client", "roster_protos", "roster_common", "scheduler_svc"])
def test_packages_are_marked_as_typed(package: str) -> None:
    assert files(package).joinpath("py.typed").is_file()
