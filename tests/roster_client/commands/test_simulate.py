"""`roster simulate` and `roster calibrate` through typer's runner."""

from __future__ import annotations

import builtins
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from roster_client.cli import app
from roster_client.terminal.exit_codes import ExitCode
from roster_client.terminal.simulation_progress import SimulationProgress
from scheduler_svc.simulator.cost_model import CostModel
from tests.support.simulated_cost import round_cost

TRACE = """arrival_s,prompt_tokens,output_tokens,tenant
0.0,40,5,a
0.1,300,20,b
0.2,20,3,a
0.5,64,9,b
"""


def roster(*arguments: str, step_ms: int = 0) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "ROSTER_TEST_BACKEND": json.dumps({"step_ms": step_ms})}
    return CliRunner().invoke(app, list(arguments), env=environment)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    trace, cost = tmp_path / "trace.csv", tmp_path / "cost.json"
    trace.write_text(TRACE)
    cost.write_text(round_cost().model_dump_json())
    return str(trace), str(cost)


def test_one_policy(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = roster("simulate", "--trace", files[0], "--cost", files[1], "--json", str(out))
    assert result.exit_code == ExitCode.OK, result.output
    for words in ("TTFT p50 / p90 / p99, ms", "fairness over tenants (Jain)", "of 2", "4 / 0", "trace.csv, 4 requests"):
        assert words in result.stdout
    (report,) = json.loads(out.read_text())["reports"]
    assert report["policy"] == "auto" and report["requests"] == 4 and report["ttft"]["p50"] > 0
    assert "draft" not in result.stdout and report["tokens_per_row"] == 1
    drafting = ("--max-drafts", "3", "--acceptance", "1,0.5")
    result = roster("simulate", "--trace", files[0], "--cost", files[1], *drafting, "--json", str(out))
    assert "accepted drafts per step" in result.stdout
    (drafts,) = json.loads(out.read_text())["reports"]
    assert 0 < drafts["accepted_tokens"] <= drafts["drafted_tokens"] and drafts["plans"] < report["plans"]


def test_policies_compared_with_a_plot(files: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    result = roster(
        "simulate", "--trace", files[0], "--cost", files[1], "--compare", "fcfs,static", "--plot", str(plot)
    )
    assert result.exit_code == ExitCode.OK, result.output
    assert "fcfs" in result.stdout and "static" in result.stdout
    assert "<svg" in plot.read_text()


def test_progress_and_results_as_each_policy_ends(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.simulator.simulation.PROGRESS_S", 0.0)
    monkeypatch.setattr("roster_client.terminal.simulation_progress.LINE_S", 0.0)
    result = roster("simulate", "--trace", files[0], "--cost", files[1], "--compare", "fcfs,static")
    lines = result.stderr.splitlines()
    assert re.fullmatch(r"fcfs: \d+%, about \d+ s left", lines[0])
    (first, second) = (place for place, line in enumerate(lines) if "4 requests, TTFT p50 / p99" in line)
    assert lines[first].startswith("fcfs: ") and "simulated in" in lines[first] and second == len(lines) - 1
    assert all(line.startswith("static: ") for line in lines[first + 1 :])


def test_the_bar_shows_policy_share_and_time_left() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with SimulationProgress(screen, ["fcfs", "fair"]) as progress:
        progress.begin("fcfs")
        progress.advance(0.5)
        progress.end("4 requests")
        progress.begin("fair")
    text = screen.file.getvalue()
    assert "fcfs (1 of 2)" in text and "50%" in text and "fcfs: 4 requests, simulated in 0 s" in text
    assert text.index("fcfs: 4 requests") < text.index("fair (2 of 2)")


def test_parameters_reach_the_policy(files: tuple[str, str], tmp_path: Path) -> None:
    def plans(parameters: str) -> int:
        out = tmp_path / "out.json"
        result = roster(
            "simulate", "--trace", files[0], "--cost", files[1], "--parameters", parameters, "--json", str(out)
        )
        assert result.exit_code == ExitCode.OK, result.output
        return int(json.loads(out.read_text())["reports"][0]["plans"])

    assert plans('{"step_tokens": 16}') > plans("{}") + 10


def test_a_policy_of_ones_own_is_compared(files: tuple[str, str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text((Path(__file__).parents[2] / "packages" / "roster-shortest" / "roster_shortest.py").read_text())
    compared = f"{mine},scheduler_svc.policies.fcfs:Fcfs,fcfs"
    result = roster("simulate", "--trace", files[0], "--cost", files[1], "--compare", compared)
    assert result.exit_code == ExitCode.OK, result.output
    mine.write_text("def broken(:")
    result = roster("simulate", "--trace", files[0], "--cost", files[1], "--policy", str(mine))
    assert result.exit_code == ExitCode.USAGE and "line 1" in result.stderr and result.stderr.count("\n") == 1


AGENTS = '{"sessions": 3, "live": 2, "turns": 3, "context_tokens": 600, "system_tokens": 64, "task_tokens": 20}'


def test_generated_sessions_of_agents(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = roster("simulate", "--agents", AGENTS, "--cost", files[1], "--json", str(out), "--kv-tokens", "100000")
    assert result.exit_code == ExitCode.OK, result.output
    (report,) = json.loads(out.read_text())["reports"]
    assert report["prefix_hit_rate"] > 0.2 and report["refused"] == 0


def test_what_the_cache_keeps_can_be_chosen(files: tuple[str, str], tmp_path: Path) -> None:
    def hit_rate(*more: str) -> float:
        out = tmp_path / "out.json"
        workload = {"sessions": 30, "live": 10, "turns": 8, "context_tokens": 500, "most_context": 900}
        lengths = {"system_tokens": 64, "task_tokens": 40, "output_tokens": 20, "fan_out": 0, "system_prompts": 1}
        sessions = json.dumps({**workload, **lengths})
        arguments = ("--agents", sessions, "--cost", files[1], "--kv-tokens", "1024", "--json", str(out), *more)
        result = roster("simulate", *arguments)
        assert result.exit_code == ExitCode.OK, result.output
        return float(json.loads(out.read_text())["reports"][0]["prefix_hit_rate"])

    lru = hit_rate()
    session = hit_rate("--retention", "session")
    assert session > lru
    assert hit_rate("--retention", "session", "--retention-parameters", '{"horizon_s": 300}') == session
    assert hit_rate("--retention", "session", "--no-hints") < session
    assert hit_rate("--retention", "session", "--host-kv-tokens", "1024") > session


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name the requests: either --trace FILE, or --agents"),
        (["--agents", "{}", "--trace", "x.csv"], "name the requests: either --trace FILE, or --agents"),
        (["--agents", "{}", "--limit", "3"], "set sessions, live, tool_pause_s"),
        (["--agents", '{"alive": 3}'], "these are no parameters of agents: alive"),
    ],
)
def test_mistakes_about_agents_are_one_sentence(files: tuple[str, str], arguments: list[str], words: str) -> None:
    result = roster("simulate", *arguments, "--cost", files[1])
    assert result.exit_code == ExitCode.USAGE, result.output
    assert words in result.stderr and "Traceback" not in result.output


def test_a_new_request_gets_into_a_delayed_plan(files: tuple[str, str], tmp_path: Path) -> None:
    def longest_ttft_s(*more: str) -> float:
        out = tmp_path / "out.json"
        result = roster("simulate", "--trace", files[0], "--cost", files[1], "--json", str(out), *more)
        assert result.exit_code == ExitCode.OK, result.output
        return float(json.loads(out.read_text())["reports"][0]["ttft"]["p99"])

    assert longest_ttft_s("--plan-lead-ms", "1") < longest_ttft_s()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nonsense"], "there is no policy 'nonsense'; installed are: "),
        (["--compare", "fcfs,nonsense"], "there is no policy 'nonsense'"),
        (["--parameters", "{"], "--parameters must be JSON"),
        (["--retention", "fcfs"], "policy 'fcfs' does not decide what the prefix cache keeps"),
        (["--retention-parameters", "[]"], "--retention-parameters must be a JSON object"),
        (["--retention", "session", "--retention-parameters", '{"x": 1}'], "does not accept these parameters"),
        (["--parameters", "[]"], "must be a JSON object"),
        (["--parameters", '{"x": 1}'], "does not accept these parameters"),
        (["--cost", "h100-none"], "there is no cost model 'h100-none': give a JSON file, or one of cpu-smollm2, h200-"),
        (["--rate-scale", "0"], "choose a number above 0"),
        (["--acceptance", "0.5,2"], "--acceptance must be a share from 0 to 1, or several separated by commas"),
        (["--plot", "plot.gif"], "a plot's file must end in .png, .svg, .pdf"),
        (["--slots", "300"], "max_step_tokens (256) must be at least its slots (300)"),
    ],
)
def test_mistakes_are_one_sentence(files: tuple[str, str], arguments: list[str], words: str) -> None:
    result = roster("simulate", "--trace", files[0], "--cost", files[1], *arguments)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert words in result.stderr and "Traceback" not in result.output


def test_missing_fields_of_a_cost_model_are_one_line(files: tuple[str, str]) -> None:
    Path(files[1]).write_text(round_cost().model_copy(update={"token_s": -1.0, "link_s": -2.0}).model_dump_json())
    result = roster("simulate", "--trace", files[0], "--cost", files[1])
    assert result.exit_code == ExitCode.USAGE
    problem = "Input should be greater than or equal to 0"
    assert result.stderr == f"{files[1]} is not a cost model: token_s: {problem}; link_s: {problem}\n"


def test_wrong_rows_are_named(files: tuple[str, str]) -> None:
    Path(files[0]).write_text(TRACE + "0.6,0,3,a\n")
    result = roster("simulate", "--trace", files[0], "--cost", files[1])
    assert result.exit_code == ExitCode.USAGE
    assert "line 6: prompt_tokens is '0': it must be a whole number of at least 1" in result.stderr


def test_missing_packages_are_named(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(names: tuple[str, ...]) -> Any:
        def import_(name: str, *rest: Any) -> Any:
            if name.startswith(names):
                raise ImportError(f"No module named {name!r}")
            return real(name, *rest)

        return import_

    monkeypatch.setattr(builtins, "__import__", without(("matplotlib",)))
    result = roster("simulate", "--trace", files[0], "--cost", files[1], "--plot", "plot.png")
    assert result.exit_code == ExitCode.USAGE and "roster-serve[plot]" in result.stderr
    monkeypatch.setattr(builtins, "__import__", without(("scheduler_svc.simulator",)))
    for command in (["simulate", "--trace", files[0], "--cost", files[1]], ["calibrate", str(tmp_path / "x.json")]):
        result = roster(*command)
        assert result.exit_code == ExitCode.USAGE and "roster-serve[scheduler]" in result.stderr


def test_calibrate_times_a_runner(tmp_path: Path) -> None:
    """The hash runner takes at least 20 ms per step, whatever its size: a fixed time, and little else.

    On a busy machine several results may be read at once, which distorts a calibration, but hardly two in a row.
    """
    file, steps = tmp_path / "slow.json", tmp_path / "steps.json"
    flags = ["--device", "hash", "--slots", "4", "--seconds", "0", "--steps", str(steps)]
    fixed_s: list[float] = []
    while max(fixed_s, default=0.0) <= 0.015:
        assert len(fixed_s) < 5, fixed_s
        result = roster("calibrate", str(file), *flags, step_ms=20)
        assert result.exit_code == ExitCode.OK, result.output
        assert "error of the model" in result.stdout
        model = CostModel.model_validate_json(file.read_text())
        assert model.name == "slow" and model.runner.slots == 4
        assert len(json.loads(steps.read_text())) > 50
        fixed_s.append(model.fixed_s)


def test_calibrate_reports_that_the_runner_ended(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-model")
    result = roster("calibrate", str(tmp_path / "x.json"), "--device", "cpu", "--model", missing)
    assert result.exit_code == ExitCode.USAGE and "the runner ended with exit status" in result.stderr
    result = roster("calibrate", str(tmp_path / "x.json"), "--device", "hash", "--listen", "ipc:///tmp/x")
    assert result.exit_code == ExitCode.USAGE and "--listen waits for a runner that you start" in result.stderr
