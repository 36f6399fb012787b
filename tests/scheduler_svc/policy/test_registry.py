"""Policies found by name: a third-party entry point that can't be imported or is not a policy gives a clear error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from scheduler_svc.policy import UnknownPolicy, available_policies, import_policy, load_policy

MODULE = """
from scheduler_svc.policy import Policy

class Good(Policy):
    "Does nothing."
    name = "good"

class Other:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a module and its dist-info, as installed by pip."""
    (tmp_path / "outside_policies.py").write_text(MODULE)
    (tmp_path / "broken_policies.py").write_text("import a_module_that_is_not_there")
    info = tmp_path / "outside_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[roster.policies]\ngood = outside_policies:Good\nother = outside_policies:Other\n"
        "missing = outside_policies:Missing\nbroken = broken_policies:Policy\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("outside_policies", "broken_policies"):
        sys.modules.pop(name, None)


def test_a_policy_from_outside_is_found(package: Path) -> None:
    assert {"good", "fcfs"} <= set(available_policies())
    assert load_policy("good", {}).name == "good"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("other", "outside_policies:Other is not a class that extends Policy"),
        ("missing", "cannot be imported: AttributeError"),
        ("broken", "No module named 'a_module_that_is_not_there'"),
    ],
)
def test_an_entry_point_that_is_no_policy_is_refused(package: Path, name: str, sentence: str) -> None:
    with pytest.raises(UnknownPolicy, match=sentence):
        load_policy(name, {})


def test_a_value_that_names_no_object_is_refused() -> None:
    with pytest.raises(UnknownPolicy, match="cannot be imported"):
        import_policy(EntryPoint("odd", "a value:", "roster.policies"))
