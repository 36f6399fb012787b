"""The extras' requirements: the scheduler's must not include torch, and every version must be pinned."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pins() -> dict[str, str]:
    """Returns the versions in constraints.txt by canonical name."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def closure(extra: str) -> set[str]:
    """Returns the canonical names of all packages that `pip install roster-serve[extra]` installs, as declared."""
    todo = [(Requirement(text), "") for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, active = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": active}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(text), wanted) for text in requires(name) or []]
    return {name for name, _ in seen}


def test_scheduler_needs_no_torch() -> None:
    found = closure("scheduler")
    assert {"grpcio", "pyzmq", "tokenizers", "huggingface-hub"} <= found
    assert found & {"torch", "transformers", "accelerate", "safetensors", "gguf"} == set()
    assert [name for name in found if name.startswith(("nvidia-", "cupy", "triton"))] == []


@pytest.mark.parametrize("extra", ["scheduler", "runner", "bench", "tracing", "dev"])
def test_everything_is_pinned(extra: str) -> None:
    assert closure(extra) - set(pins()) == set(), "add them to constraints.txt"


@pytest.mark.parametrize("extra", ["cuda"])
def test_cuda_is_pinned(extra: str) -> None:
    try:
        found = closure(extra)
    except PackageNotFoundError:
        found = {canonicalize_name(Requirement(text).name) for text in PROJECT["optional-dependencies"][extra]}
    assert found - set(pins()) == set(), "add them to constraints.txt"


def test_pins_satisfy_the_project() -> None:
    every = PROJECT["dependencies"] + [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    for text in every:
        requirement = Requirement(text)
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}, but constraints.txt has {version}"


def test_pins_are_versions() -> None:
    version = r"([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?"
    assert [pin for pin in pins().values() if not re.fullmatch(version, pin)] == []
