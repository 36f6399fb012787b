"""docs/settings.md says what the settings classes say, and each setting is documented."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from pydantic_settings import BaseSettings

from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings import SchedulerSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def generator() -> ModuleType:
    """docs/generate_settings.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("generate_settings", DOCS / "generate_settings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_fresh(generator: ModuleType) -> None:
    assert (DOCS / "settings.md").read_text("utf-8") == generator.page(), "run `make docs`"


@pytest.mark.parametrize("settings", [SchedulerSettings, RunnerSettings])
def test_every_setting_is_documented(settings: type[BaseSettings]) -> None:
    assert [name for name, field in settings.model_fields.items() if not field.description] == []
