"""Allowed imports: services share roster_protos and roster_common, the scheduler has no torch, nothing pickles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("roster_protos", "roster_common", "scheduler_svc", "runner_svc", "roster_client")
GPU = {"torch", "transformers", "cupy", "accelerate", "safetensors"}
FORBIDDEN = {
    "roster_protos": GPU | {"roster_common", "scheduler_svc", "runner_svc", "roster_client"},
    "roster_common": GPU | {"numpy", "grpc", "roster_protos", "scheduler_svc", "runner_svc", "roster_client"},
    "scheduler_svc": GPU | {"runner_svc", "roster_client"},
    "runner_svc": {"scheduler_svc", "roster_client"},
    "roster_client": GPU,
}
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}


def sources(package: str) -> list[Path]:
    """Returns the package's modules, except generated ones."""
    found = [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]
    assert found, package
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields the top-level names of all modules imported absolutely, anywhere in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(name.value).split(".")[0] for name in node.args[:1] if isinstance(name, ast.Constant))


def pickles(tree: ast.AST) -> list[str]:
    """Returns the places where a source could unpickle."""
    found = sorted(set(imported(tree)) & PICKLERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if name.endswith("pyobj") or options.get("allow_pickle") == "True":
                found.append(f"line {node.lineno}: {name}")
            if name == "torch.load" and options.get("weights_only") != "True":
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): bad
        for path in sources(package)
        if (bad := sorted(set(imported(ast.parse(path.read_text("utf-8")))) & FORBIDDEN[package]))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", [*PACKAGES, "bench"])
def test_nothing_pickles(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): bad
        for path in sources(package)
        if (bad := pickles(ast.parse(path.read_text("utf-8"))))
    }
    assert wrong == {}


def test_the_checks_find_violations() -> None:
    hidden = ast.parse("def f():\n    from torch.nn import Linear\n    importlib.import_module('cupy.cuda')\n")
    assert set(imported(hidden)) == {"torch", "cupy"}
    assert (
        len(pickles(ast.parse("import pickle\nsocket.recv_pyobj()\nnp.load(f, allow_pickle=True)\ntorch.load(f)"))) == 4
    )
    assert pickles(ast.parse("np.load(f, allow_pickle=False)\ntorch.load(f, weights_only=True)")) == []


def test_kernels_hold_no_python() -> None:
    """An importable `kernels` would shadow a library that transformers probes for."""
    assert list((ROOT / "kernels").rglob("*.py")) == []


def test_common_modules_import_little() -> None:
    """Front workers, launchers and commands import them first, but for what only owners of a server's socket import."""
    names = [path.stem for path in sources("roster_common")]
    modules = [f"roster_common.{name}" for name in names if name not in ("__init__", "curve_server")]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "grpc", "zmq"} & set(loaded.stdout.split()) == set()
