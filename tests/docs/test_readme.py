"""The README's examples work: its client code, policy, make targets, settings and links."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policy import PolicyGuard, RequestView
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.processes import RosterProcesses

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def code(marker: str) -> str:
    """Returns the Python block that contains `marker`."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if marker in block]
    assert len(blocks) == 1
    return blocks[0]


async def test_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RosterProcesses(tmp_path, runner={"device": "hash"}) as roster:
        source = code("RosterClient").replace("127.0.0.1:50061", roster.address)
        names: dict[str, Any] = {}
        exec("async def example():\n" + textwrap.indent(source, "    "), names)
        await asyncio.wait_for(names["example"](), 30)
    assert re.findall(r"^(\w+)\(", capsys.readouterr().out, re.M)[-1] in ("Finished", "Ended", "Usage")


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
