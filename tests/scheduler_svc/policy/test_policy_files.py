"""Policies in files and modules: at start by any path, through a call only by the name of a file of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policies.fcfs import Fcfs
from scheduler_svc.policy import (
    Policy,
    PolicyGuard,
    RequestView,
    UnknownPolicy,
    WrongParameters,
    load_policy,
    permitted_policy_class,
)

ROOT = Path(__file__).parents[3]
SHORTEST = (ROOT / "tests" / "packages" / "roster-shortest" / "roster_shortest.py").read_text("utf-8")
TWO = (
    SHORTEST
    + """

class Longest(ShortestPrompt):
    def key(self, request, ledger):
        return -request.prompt_tokens
"""
)


def key(policy: Policy, prompt_tokens: int) -> Any:
    return PolicyGuard(policy).key(RequestView("id", "", 0.0, 0, prompt_tokens, 1, 1), Ledger())


def test_a_file_and_a_module_are_policies_under_the_names_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(SHORTEST)
    (tmp_path / "two.py").write_text(TWO)
    monkeypatch.chdir(tmp_path)
    for given, shown in (("./mine.py", "mine.py"), (str(tmp_path / "mine.py"), "mine.py"), ("mine.py", "mine.py")):
        policy = load_policy(given, {"tokens_per_s": 2})
        assert (policy.name, policy.parameters.tokens_per_s) == (shown, 2.0) and key(policy, 7) == (7.0,)
    longest = load_policy("./two.py:Longest", {})
    assert longest.name == "two.py:Longest" and key(longest, 7) == (-7,)
    module = load_policy("scheduler_svc.policies.fcfs:Fcfs", {})
    assert isinstance(module, Fcfs) and module.name == "scheduler_svc.policies.fcfs:Fcfs" and Fcfs.name == "fcfs"
    with pytest.raises(WrongParameters, match=r"policy 'mine.py' .* It knows: .*tokens_per_s"):
        load_policy("./mine.py", {"tokens": 2})


def test_a_file_is_read_each_time_and_a_broken_one_leaves_the_last(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SHORTEST)
    first = load_policy("mine.py", {}, tmp_path)
    file.write_text(SHORTEST.replace("request.prompt_tokens +", "3 * request.prompt_tokens +"))
    assert key(load_policy("mine.py", {}, tmp_path), 7) == (21.0,) and key(first, 7) == (7.0,)
    file.write_text("raise SystemExit(3)")
    with pytest.raises(UnknownPolicy, match=r"mine\.py is broken in line 1: SystemExit\(3\)"):
        load_policy("mine.py", {}, tmp_path)
    assert key(first, 7) == (7.0,)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import pydantic\ndef f(:\n", "mine.py is broken in line 2: SyntaxError: invalid syntax"),
        ("\n\nimport no_such_module\n", "mine.py is broken in line 3: ModuleNotFoundError"),
        ("\x00", "mine.py is broken"),
        ("a = 1\n", "must have one class that extends Policy; it has none"),
        (TWO, "it has ShortestPrompt, Longest: name one, mine.py:ShortestPrompt for example"),
        (None, "mine.py can't be read: No such file or directory"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, source: str | None, sentence: str) -> None:
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UnknownPolicy) as caught:
        load_policy(str(tmp_path / "mine.py"), {})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module:Class", "math:pi", "scheduler_svc.policy:nothing", "nothing"])
def test_a_module_without_the_policy_is_refused(name: str) -> None:
    with pytest.raises(UnknownPolicy, match=name):
        load_policy(name, {})


def test_a_call_names_files_of_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    folder.mkdir()
    for file in (folder / "mine.py", tmp_path / "other.py", folder / "_hidden.py"):
        file.write_text(SHORTEST)
    assert permitted_policy_class("mine.py", folder).name == "mine.py"
    assert permitted_policy_class("mine.py:ShortestPrompt", folder).name == "mine.py:ShortestPrompt"
    assert permitted_policy_class("fcfs", folder).name == "fcfs"
    for name in ("../other.py", str(tmp_path / "other.py"), "./mine.py", str(folder / "mine.py"), "other.py",
                 "_hidden.py", "scheduler_svc.policies.fcfs:Fcfs", "..", "mine", ""):  # fmt: skip
        with pytest.raises(UnknownPolicy, match=r"mine\.py"):
            permitted_policy_class(name, folder)
    for name in ("mine.py", "./mine.py", "scheduler_svc.policies.fcfs:Fcfs"):
        with pytest.raises(UnknownPolicy, match="--policy-dir"):
            permitted_policy_class(name, None)
    with pytest.raises(UnknownPolicy, match=r"no_folder can't be read .*policy_dir"):
        load_policy("fcfs", {}, tmp_path / "no_folder")
