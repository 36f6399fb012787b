"""The README's examples work: its client code, policy, make targets, settings and links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policy import PolicyGuard, RequestView
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.processes import RosterProcesses
from tests.support.thoroughness import FULL

ROOT = Path(__file__).resolve().parents[2]
README_PAGE = ROOT / "README.md"
README = README_PAGE.read_text("utf-8")


def code(marker: str) -> str:
    """Returns the Python block that contains `marker`."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if marker in block]
    assert len(blocks) == 1
    return blocks[0]


def test_client(tmp_path: Path) -> None:
    """The page's client runs as a file; so would the conversation that the page names."""
    (message,) = re.findall(r"`(\{\"role\": .*?\})`", README)
    with RosterProcesses(tmp_path, runner={"device": "hash"}) as roster:
        example = code("RosterClient").replace("127.0.0.1:50061", roster.address)
        for number, prompt in enumerate(('"Hello!"', f"[{message}]")):
            file = tmp_path / f"example{number}.py"
            file.write_text(example.replace('"Hello!"', prompt), "utf-8")
            done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60, cwd=ROOT)
            assert re.findall(r"^(\w+)\(", done.stdout, re.M)[-2:] == ["Finish", "Usage"], done.stdout + done.stderr


@pytest.mark.parametrize("page", [README_PAGE, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_python_on_a_page_compiles_as_a_file(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S):
        compile(block, str(page), "exec")


def test_policy() -> None:
    source = code("(Policy)")
    package = ROOT / "tests" / "packages" / "roster-shortest" / "roster_shortest.py"
    assert package.read_text("utf-8") == source
    names: dict[str, Any] = {}
    exec(source, names)
    policy = PolicyGuard(names["ShortestPrompt"](names["ShortestPromptParameters"]()))

    def key(arrival_s: float, prompt_tokens: int) -> Any:
        return policy.key(RequestView("id", "", arrival_s, 0, prompt_tokens, 1, 1), Ledger())

    assert key(0.0, 10) < key(0.0, 1000) < key(9.0, 200)
    assert policy.failures == 0


def test_the_policy_is_clean_under_mypy_strict(tmp_path: Path) -> None:
    """`mypy` checks the package with these flags; the rest of the list costs seconds."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        config = tomllib.load(file)["tool"]["mypy"]
    assert "tests/packages/roster-shortest" in config["files"]
    (flags,) = [one for one in config["overrides"] if one["module"] == ["roster_shortest"]]
    assert flags["warn_return_any"] and flags["disallow_any_generics"] and flags["disallow_subclassing_any"]
    if not FULL:
        return
    (tmp_path / "mine.py").write_text(code("(Policy)"))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path, "mine.py"]
    ours = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=ours, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_the_section_about_policies_is_short() -> None:
    assert len(README.split("## Write a policy")[1].split("\n## ")[0].splitlines()) < 40


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", README, re.M))
    used = {target for pair in named for target in pair if target}
    assert len(used) > 5
    assert used <= targets


def test_settings() -> None:
    """A default in code font is the field's; a default in words depends on the device."""
    rows = re.findall(r"^\| `ROSTER_(\w+)` \| ([^|]+) \|", README, re.M)
    assert len(rows) > 5
    fields = SchedulerSettings.model_fields | RunnerSettings.model_fields
    for name, told in rows:
        default = fields[name.lower()].default
        spelled = str(default).lower() if isinstance(default, bool) else default
        assert default is None if "`" not in told else told == f"`{spelled}`", name


def test_links() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", README)
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []
