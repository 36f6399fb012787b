"""Files and modules named in sources and pages exist: a move does not update strings."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    "scheduler_svc",
    "runner_svc",
    "roster_client",
    "roster_common",
    "roster_protos",
    "protos",
    "kernels",
    "bench",
    "tests",
    "docs",
    "deploy",
    "examples",
]
CODE = ("scheduler_svc", "runner_svc", "roster_client", "roster_common", "roster_protos", "bench", "tests")
TEXT = (".md", ".py", ".toml", ".yaml", ".yml", ".sh", ".cu", ".cuh", ".proto", ".ts", ".go")
NAMED = ("Makefile", "Dockerfile.scheduler", "Dockerfile.runner", ".dockerignore", "run")
OUTSIDE = ("bench/results/", "bench/traces/", "tests/link_frames/")
"""Records of the past, which name files of their time."""
MADE = (
    "examples/typescript/dist/",
    "examples/typescript/src/generated/",
    "deploy/wheels/",
    "deploy/secrets/",
    "roster_common/commit.txt",
)
"""Created by commands and not in the repository."""
PLACEHOLDER = re.compile(r"\b(?:DATE|test_NAME|NAME|x\.proto|old\.json|new\.json)")

PATH = re.compile(rf"(?<![\w/.<>-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*]")
# `bench.x` is often a variable; another test covers the modules of bench/ that are run.
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(name for name in CODE if name != 'bench')})(?:\.[A-Za-z_]\w*)+")
RUN = re.compile(r"""-m["',\s]+([A-Za-z_][\w.]*)""")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@cache
def texts() -> dict[str, str]:
    """Returns the tracked text files by path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    chosen = [name for name in listed if name.endswith(TEXT) or name.rpartition("/")[2] in NAMED]
    chosen = [name for name in chosen if not name.startswith(OUTSIDE) and name != "tests/packaging/test_mentions.py"]
    return {name: (ROOT / name).read_text("utf-8") for name in chosen if (ROOT / name).is_file()}


@cache
def tracked() -> frozenset[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    folders = {str(parent) for name in listed for parent in Path(name).parents}
    return frozenset({*listed, *folders})


def is_there(path: str) -> bool:
    """Returns whether a path names a file, from the root, from tests/ (conftest.py), or in protobuf's pool."""
    path = path.rstrip("/.").replace(".*", "*")
    if path.startswith("roster_protos/") and path.endswith("proto"):
        path = path.replace("roster_protos/", "protos/", 1)
    seen = (path, f"tests/{path}")
    return f"{path}/".startswith(MADE) or any(name in tracked() or any(ROOT.glob(name)) for name in seen)


@cache
def names_of(path: Path) -> frozenset[str]:
    """Returns the names that a module defines or imports at top level, and the members of its classes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found)


def resolves(name: str) -> bool:
    """Returns whether a dotted name is a module or a name in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_dir() and length == len(parts):
            return True
        if module.is_file():
            return length == len(parts) or parts[length] in names_of(module)
    return False


def test_paths_that_are_named_exist() -> None:
    missing = sorted(
        f"{name}: {path}"
        for name, text in texts().items()
        for path in set(PATH.findall(text))
        if ("." in path.rpartition("/")[2] or name.endswith(".md"))
        and not PLACEHOLDER.search(path)
        and not is_there(path)
    )
    assert missing == []


def test_modules_that_are_named_exist() -> None:
    missing = sorted(
        f"{name}: {dotted}"
        for name, text in texts().items()
        for dotted in set(DOTTED.findall(text))
        if not resolves(dotted) and not dotted.endswith((".py", ".md", "__"))
    )
    assert missing == []


def test_modules_that_are_run_exist() -> None:
    found = {(name, module) for name, text in texts().items() for module in RUN.findall(text)}
    ours = {(name, module) for name, module in found if module.partition(".")[0] in CODE and "." in module.strip(".")}
    assert len(ours) > 40
    missing = []
    for name, module in sorted(ours):
        path = ROOT.joinpath(*module.rstrip(".").split("."))
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            missing.append(f"{name}: -m {module}")
    assert missing == []


def test_links_between_pages_lead_somewhere() -> None:
    missing = []
    for name, text in texts().items():
        for link in LINK.findall(text) if name.endswith(".md") else ():
            target = Path(name).parent / link
            if "://" not in link and not link.startswith("mailto:") and not (ROOT / target).resolve().exists():
                missing.append(f"{name}: {link}")
    assert missing == []


def test_entry_points_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    points = {**project["scripts"], **project["entry-points"]["roster.policies"]}
    assert [point for point in points.values() if not resolves(point.replace(":", "."))] == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("scheduler_svc.policy", True),
        ("scheduler_svc.policy.Policy", True),
        ("scheduler_svc.policies.fcfs.Fcfs", True),
        ("scheduler_svc.policies.fcfs.Lifo", False),
        ("scheduler_svc.no_such_module", False),
    ],
)
def test_names_are_resolved(name: str, there: bool) -> None:
    assert resolves(name) is there
