"""Every benchmark's module imports, or lacks only a library that a GPU machine or a fuzzer has."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(ROOT / "bench")], "bench.") if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_imports(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("cupy", "atheris"):
            raise
        pytest.skip(f"needs {missing.name}")
