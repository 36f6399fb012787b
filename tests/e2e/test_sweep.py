"""Every command with everything that goes wrong: one sentence, a status, nothing left running.

CI runs a small part; ROSTER_TEST_FULL=1 runs all, with Ctrl-C at random moments of a seed (ROSTER_TEST_SEED).
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.serve import taken_addresses
from roster_common.service_command import read_command_line
from roster_common.setting_sources import UnusableSettings
from tests.support import sweep
from tests.support.sweep import SERVICES, Case
from tests.support.swept_process import Ended, run
from tests.support.thoroughness import FULL, count

MOMENTS = count(8, in_ci=0)
"""Moments of Ctrl-C for each command."""
EARLIEST_S = 0.3
"""Before that, the interpreter itself starts, and prints a traceback that no program can prevent."""

IN_PROCESS = list(
    chain(
        sweep.unknown_options(),
        sweep.wrong_numbers(),
        sweep.wrong_settings(),
        sweep.dead_peers(),
        sweep.unwritable_files(),
    )
)
PROCESSES = [*sweep.missing_extras(), *sweep.full_disks()]


def some(cases: list[Case], number: int) -> list[Case]:
    """Returns all cases, or in CI a few that are spread over them."""
    return cases if FULL else cases[:: max(1, len(cases) // number)][:number]


def check(case: Case, ended: Ended) -> None:
    """Checks the verdict. A signal is answered by at most one sentence; services may log lines."""
    said = f"{case}\nstatus {ended.status}\n{ended.stdout}\n{ended.stderr}"
    assert "Traceback" not in ended.stderr + ended.stdout, said
    assert ended.status in case.statuses, said
    assert len(ended.sentences) <= 1 if case.interrupt_s is not None else len(ended.sentences) == 1, said
    assert ended.left == [], said


def run_here(case: Case) -> Ended:
    """Runs the command line in this process; of a service only the part that reads settings."""
    if case.command[0] == "roster":
        result = CliRunner().invoke(app, list(case.command[1:]))
        crash = "" if isinstance(result.exception, SystemExit | None) else f"\nTraceback {result.exception!r}"
        return Ended(result.exit_code, result.stdout, result.stderr + crash, [])
    program, *flags = case.command
    try:
        read_command_line(SERVICES[program], program, "", str, flags)
    except UnusableSettings as error:
        return Ended(2, "", str(error), [])
    return Ended(0, "", "", [])


@pytest.mark.parametrize("case", some(IN_PROCESS, 12), ids=str)
def test_wrong_values_dead_peers_and_files(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "200", "NO_COLOR": "1", **case.environment}.items():
        monkeypatch.setenv(name, value)
    check(case, run_here(case))


@pytest.mark.parametrize("case", PROCESSES if FULL else [*sweep.missing_extras()][-2:], ids=str)
def test_missing_extras_and_full_disks(case: Case, tmp_path: Path) -> None:
    check(case, run(case.command, tmp_path, blocked=case.blocked, stdout=case.stdout))


@pytest.mark.skipif(not FULL, reason="a process for each option; test_environment has the services")
def test_folders_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for case in sweep.unwritable_files(str(tmp_path / "file.svg")):
        if "--tls-" not in str(case):
            check(case, run(case.command, tmp_path, other_user=True))


@pytest.mark.skipif(not FULL, reason="starts a scheduler; test_wrong_port has what gateways are told")
def test_a_scheduler_without_the_gateways_extra_says_so(tmp_path: Path) -> None:
    command = ("roster-scheduler", *sweep.ANYWHERE)
    ended = run(command, tmp_path, blocked=("smg_grpc_proto",), interrupt_s=8.0)
    assert ended.status == 0 and ended.left == [], ended
    assert "the service for OpenAI gateways is off: run pip install 'roster-serve[openai]'" in ended.stderr


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize("index", range(len([*sweep.taken_ports(0)]) if FULL else 0))
def test_taken_ports(index: int, taken_port: int, tmp_path: Path) -> None:
    case = [*sweep.taken_ports(taken_port)][index]
    check(case, run(case.command, tmp_path))


def test_serve_refuses_a_taken_port(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken_addresses, "LETTING_GO_S", 0.0)
    _, case, *_ = sweep.taken_ports(taken_port)
    ended = run_here(case)
    check(case, ended)
    assert ended.stderr.startswith(f"listen is 127.0.0.1:{taken_port}, which another process uses: stop that process")


@pytest.mark.parametrize("command", sweep.interrupted() if MOMENTS else [], ids=" ".join)
def test_interrupts(command: tuple[str, ...], tmp_path: Path) -> None:
    moments = random.Random(f"{os.environ.get('ROSTER_TEST_SEED', '0')} {command}")
    for _ in range(MOMENTS):
        case = Case(
            "Ctrl-C", command, (0, 3, 130), interrupt_s=moments.uniform(EARLIEST_S, sweep.interrupted()[command])
        )
        check(case, run(command, tmp_path, interrupt_s=case.interrupt_s))
