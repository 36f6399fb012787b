"""docs/settings.md is generated from the current settings classes, and each setting is documented."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from pydantic_settings import BaseSettings

from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def generator() -> ModuleType:
    """Loads docs/generate_settings.py, which is not in a package."""
    spec = importlib.util.spec_from_file_location("generate_settings", DOCS / "generate_settings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_fresh(generator: ModuleType) -> None:
    assert (DOCS / "settings.md").read_text("utf-8") == generator.page(), "run `make docs`"


def test_names_are_fresh(generator: ModuleType) -> None:
    assert generator.MODULE.read_text("utf-8") == generator.module(), "run `make docs`"


@pytest.mark.parametrize("settings", [SchedulerSettings, RunnerSettings])
def test_every_setting_is_documented(settings: type[BaseSettings]) -> None:
    assert [name for name, field in settings.model_fields.items() if not field.description] == []


def test_few_settings_are_for_everyone(generator: ModuleType) -> None:
    counts = {
        level: sum(len(generator.names(cls, level)) for cls in generator.COMMANDS.values())
        for level in generator.TITLES
    }
    assert counts["everyone"] <= 15 and counts["operators"] <= 25, counts


def test_hidden_settings_are_for_tests(generator: ModuleType) -> None:
    hidden = {name for cls in generator.COMMANDS.values() for name in generator.names(cls, None)}
    assert hidden == {"check", "weights", "test_backend"}
