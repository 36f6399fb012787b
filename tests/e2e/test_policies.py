"""Policies of a running service: an external package is installed, found, and swapped in while a stream runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from roster_client.cli import app
from roster_client.client.events import Completion
from roster_client.client.sync_client import SyncRosterClient
from roster_client.terminal.exit_codes import ExitCode
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes

PACKAGE = Path(__file__).parents[1] / "packages" / "roster-shortest"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the package, installed by pip without the network and without changing this environment."""
    target = tmp_path_factory.mktemp("site")
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), str(PACKAGE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the scheduler's folder of policies, with the package's file as mine.py."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "mine.py").write_text((PACKAGE / "roster_shortest.py").read_text("utf-8"))
    return folder


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory, installed: Path, folder: Path) -> Iterator[RosterProcesses]:
    """Both services; the scheduler starts with the external policy."""
    settings = {"policy": "shortest", "policy_parameters": '{"tokens_per_s": 7}', "policy_dir": str(folder)}
    runner = {"device": "hash", "test_backend": {"step_ms": 5, "eos_probability": 0}, "slots": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{installed}")
        with roster_processes(tmp_path_factory.mktemp("policies"), scheduler=settings, runner=runner) as processes:
            yield processes


def policy(roster: RosterProcesses, *arguments: str) -> Result:
    command = ["policy", *arguments, "--admin", roster.admin_address]
    return CliRunner().invoke(app, command, env={"COLUMNS": "250", "NO_COLOR": "1"})


def in_force(roster: RosterProcesses) -> tuple[str, dict[str, object]]:
    answer = json.loads(policy(roster, "list", "--json").stdout)
    return answer["policy"], json.loads(answer["policy_parameters"])


def test_an_external_policy_is_found_by_its_entry_point(roster: RosterProcesses) -> None:
    name, parameters = in_force(roster)
    assert name == "shortest" and parameters["tokens_per_s"] == 7
    listed = policy(roster, "list").stdout
    (row,) = [line for line in listed.splitlines() if "roster-shortest" in line]
    assert "▶" in row and "Shortest prompt first" in row and "tokens_per_s" in row
    assert all(name in listed for name in ("fcfs", "orca", "static"))


def test_show_lists_parameters_with_their_values(roster: RosterProcesses) -> None:
    policy(roster, "set", "shortest", "tokens_per_s=2.5")
    shown = policy(roster, "show").stdout
    row = shown[shown.index("│ tokens_per_s") :].partition("├")[0]
    assert all(word in row for word in ("number ≥ 0", "2.5", "(default: 100", "prompt tokens")) and ", current" in shown
    other = policy(roster, "show", "fcfs")
    assert other.exit_code == ExitCode.OK and "step_tokens" in other.stdout and ", current" not in other.stdout


def test_swaps_while_a_stream_runs_cost_it_nothing(roster: RosterProcesses) -> None:
    completions: list[Completion] = []

    def read() -> None:
        with (
            SyncRosterClient(roster.address) as client,
            client.generate([1, 2, 3], max_tokens=300, temperature=0) as stream,
        ):
            completions.append(stream.completion())

    reader = threading.Thread(target=read)
    reader.start()
    answer = json.loads(policy(roster, "list", "--json").stdout)
    names = [entry["name"] for entry in answer["policies"] if not entry["problem"]]
    for name in [*names, "shortest"]:
        changed = policy(roster, "set", name)
        assert changed.exit_code == ExitCode.OK, changed.stderr
        assert f"policy {name} " in changed.stdout and "running sequences were ranked again" in changed.stdout
        assert in_force(roster)[0] == name
    reader.join(60)
    assert list(completions[0].choices[0].token_ids) == expected_tokens([1, 2, 3], 300, eos_probability=0)
    status = CliRunner().invoke(app, ["status", "--json", "--admin", roster.admin_address])
    assert int(json.loads(status.stdout)["totals"]["policy_changes"]) > len(names)
    assert "the policy changed" in roster.logs()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("set", "fcsf"), ExitCode.REFUSED, "there is no policy 'fcsf'; installed are: "),
        (
            ("set", "../mine.py"),
            ExitCode.REFUSED,
            "is a path: name a file of the scheduler's folder of policies, mine.py",
        ),
        (("set", "shortest", "tokens=1"), ExitCode.REFUSED, "step_tokens, finish_tokens, tokens_per_s"),
        (("set", "shortest", "tokens_per_s=-1"), ExitCode.REFUSED, "greater than or equal to 0"),
        (("set", "shortest", "tokens_per_s"), ExitCode.USAGE, "KEY=VALUE"),
        (("show", "fcsf"), ExitCode.USAGE, "installed are: "),
    ],
)
def test_errors_are_reported_in_a_sentence(
    roster: RosterProcesses, arguments: tuple[str, ...], code: ExitCode, sentence: str
) -> None:
    before = in_force(roster)
    result = policy(roster, *arguments)
    assert result.exit_code == code and result.stderr.count("\n") == 1
    assert sentence in result.stderr and result.stdout == ""
    assert in_force(roster) == before


def test_a_file_is_read_each_time_and_a_broken_one_changes_nothing(roster: RosterProcesses, folder: Path) -> None:
    file, working = folder / "mine.py", (folder / "mine.py").read_text("utf-8")
    assert policy(roster, "set", "mine.py", "tokens_per_s=3").exit_code == ExitCode.OK
    file.write_text(working.replace("Field(100,", "Field(9,"))
    assert policy(roster, "set", "mine.py").exit_code == ExitCode.OK
    before = in_force(roster)
    assert before[0] == "mine.py" and before[1]["tokens_per_s"] == 9
    file.write_text("import nothing_of_this_name\n")
    broken = policy(roster, "set", "mine.py")
    assert broken.exit_code == ExitCode.REFUSED and "mine.py is broken in line 1: ModuleNotFoundError" in broken.stderr
    assert broken.stderr.count("\n") == 1 and in_force(roster) == before
    (row,) = [line for line in policy(roster, "list").stdout.splitlines() if "mine.py" in line and "▶" in line]
    assert "can't be used" in row
    file.write_text(working)


def test_cached_tokens_are_in_the_usage(roster: RosterProcesses) -> None:
    """Blocks have 16 tokens; a prompt of 48 hits two of its three blocks, since its last token is always computed."""
    prompt = list(range(100, 148))
    with SyncRosterClient(roster.address) as client:
        cached = []
        for salt in ("", "", "other", "other"):
            with client.generate(prompt, max_tokens=4, temperature=0, cache_salt=salt) as stream:
                completion = stream.completion()
            assert list(completion.choices[0].token_ids) == expected_tokens(prompt, 4, eos_probability=0)
            assert completion.usage is not None and completion.usage.prompt_tokens == 48
            cached.append(completion.usage.cached_tokens)
    assert cached == [0, 32, 0, 32]
