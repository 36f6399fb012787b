"""Every benchmark can be started: its module imports, or says that it needs a GPU's library."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(bench.__path__, "bench.") if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_imports(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != "cupy":
            raise
        pytest.skip("needs CuPy")
