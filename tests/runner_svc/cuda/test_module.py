"""Loading a kernel's module: CuPy's compiler is asked for its version once, and loads are counted."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from runner_svc.cuda import module


class FakeModule:
    """Compiles as CuPy 14 does: the version is that of an empty file, remembered by its options."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self._options = options

    def compile(self) -> None:
        compiler: Any = sys.modules["cupy"].cuda.compiler
        if compiler._empty_file_preprocess_cache.get(self._options, None) is None:
            compiler.asked += 1
            compiler._empty_file_preprocess_cache[self._options] = "// version"


@pytest.mark.parametrize("version", [{}, None])
def test_the_version_is_asked_once(version: dict[Any, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`version` None: a CuPy that remembers it elsewhere is left alone."""
    compiler = SimpleNamespace(asked=0, _empty_file_preprocess_cache=version)
    if version is None:
        monkeypatch.setattr(FakeModule, "compile", lambda self: None)
    device = SimpleNamespace(compute_capability="80")
    cuda = SimpleNamespace(compiler=compiler, Device=lambda: device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=FakeModule))
    monkeypatch.setattr(module, "LOADS", module.Loads())
    for each in (module._ask_compiler_once, module.is_hopper):
        each.cache_clear()
    for size in (1, 2, 3):
        module.load("silu_mul", {"SIZE": size})
    assert compiler.asked == (version is not None)
    assert module.LOADS.count == 3 and module.LOADS.seconds > 0
    for each in (module._ask_compiler_once, module.is_hopper):
        each.cache_clear()
