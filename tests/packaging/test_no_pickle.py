"""No code reads or writes a format that can run code: no pickle between processes, none for weights."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("scheduler_svc", "runner_svc", "roster_client", "roster_protos", "roster_common", "bench", "kernels")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
"""multiprocessing pickles the objects that it sends."""
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def offences(source: str) -> list[str]:
    """Returns imports of modules that pickle, and calls that unpickle, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        found += [f"line {node.lineno}: imports {name}" for name in names if name in MODULES]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            called = f"{node.func.value.id}." if isinstance(node.func.value, ast.Name) else "."
            called += node.func.attr
            weights_only = keywords.get("weights_only")
            safe = isinstance(weights_only, ast.Constant) and weights_only.value is True
            if called == "torch.load" and not safe:
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
            if "allow_pickle" in keywords or node.func.attr in ("send_pyobj", "recv_pyobj", "read_pickle"):
                found.append(f"line {node.lineno}: {called}")
    return found


def test_the_search_finds_violations() -> None:
    source = "import pickle\nfrom torch.multiprocessing import x\nimport torch\ntorch.load('x')\n"
    source += (
        "torch.load('x', weights_only=True)\nsocket.recv_pyobj()\nnp.load('x', allow_pickle=True)\nimport dill as d\n"
    )
    assert [line.split(":")[0] for line in sorted(offences(source))] == [
        "line 1",
        "line 4",
        "line 6",
        "line 7",
        "line 8",
    ]


def test_no_pickle() -> None:
    assert len(SOURCES) > 100
    assert {path.name: found for path in SOURCES if (found := offences(path.read_text()))} == {}
