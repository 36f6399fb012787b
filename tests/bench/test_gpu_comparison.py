"""Comparison on one card: its cases and budget, its summary of runs, and the whole command on the hash model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_comparison.__main__ import main
from bench.gpu_comparison.budget import Budget
from bench.gpu_comparison.loads import GIANT, Case, parse_cases, workloads
from bench.gpu_comparison.options import SHAPE_LOADS, parse_options
from bench.gpu_comparison.report import remarks, write_pages
from bench.gpu_comparison.table import disturbance, line, sentence
from roster_client.bench.records.record import RequestRecord, Run, RunHeader, Status
from roster_client.bench.records.record_file import read_runs

SMALL = (
    "--device=hash", "--model=hash", "--seconds=1", "--drain=2", "--giant-seconds=1.5", "--background=4", "--giant=300",
    "--prompt-divisor=16", "--output-divisor=16", "--slots=8", "--kv-tokens=8192", "--step-tokens=64",
)  # fmt: skip


def record(due_s: float, times_s: tuple[float, ...], wanted: int, prompt: int = 10) -> RequestRecord:
    status = Status.OK if len(times_s) == wanted else Status.TIMEOUT
    return RequestRecord(f"{due_s}", due_s, due_s, status, wanted, prompt, len(times_s), times_s, (1,) * len(times_s))


def run_of(requests: list[RequestRecord], load: str = "2") -> Run:
    settings = {"load": load, "given_up_s": 10.0, "ttft_target_ms": 1000.0, "itl_target_ms": 50.0}
    return Run(RunHeader("fcfs", "t", "m", "w", "a", "c", "cmd", rate=2.0, settings=settings), requests)


def test_loads_are_named_by_system() -> None:
    assert parse_cases("orca=4,giant") == [Case("orca", "4"), Case("orca", GIANT)]
    assert parse_cases("orca=4")[0].title == "orca, 4/s"
    for wrong in ("vllm=4", "fcfs", "fcfs=", "fcfs=0", "fcfs=fast"):
        with pytest.raises(ValueError, match=r"is no list of loads|is neither a rate|could not convert"):
            parse_cases(wrong)
    for shape, texts in SHAPE_LOADS.items():
        options = parse_options([f"--shape={shape}", "--out=x"])
        assert options.cases == [case for text in texts for case in parse_cases(text)]


def test_all_systems_get_the_same_requests_and_the_giant_comes_amid_the_chats() -> None:
    options = parse_options([*SMALL, "--out=x", "--loads", "fcfs=20,giant", "static=20"])
    works = workloads(options, options.cases, 1000)
    assert list(works) == ["20", GIANT]
    assert len(works["20"].requests) == 20 and works["20"].requests[-1].scheduled_s == pytest.approx(1.0, rel=0.6)
    chats = works[GIANT].requests
    giant = max(chats, key=lambda request: request.prompt_tokens)
    assert (giant.prompt_tokens, giant.output_tokens) == (300, 1)
    assert 0 < chats.index(giant) < len(chats) - 1 and {one.output_tokens for one in chats} == {1, 12}


def test_a_case_without_time_is_left_out_and_a_short_one_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options([*SMALL, "--out=x", "--loads", "fcfs=20"])
    work = workloads(options, options.cases, 1000)["20"]
    last_s = work.requests[-1].scheduled_s
    assert Budget.of(1000).run_s(options.cases[0], work, 8.0) == pytest.approx(last_s + 8)
    assert last_s + 3 < (Budget.of(last_s + 5).run_s(options.cases[0], work, 8.0) or 0) <= last_s + 5
    assert Budget.of(1000).without(1000).run_s(options.cases[0], work, 8.0) is None
    assert "left out: fcfs, 20/s" in capsys.readouterr().out


def test_what_was_given_up_counts() -> None:
    served, cut, unanswered = record(0.0, (0.5, 0.52), 2), record(1.0, (1.5, 1.6), 3), record(2.0, (), 3)
    text = line(run_of([served, cut, unanswered]))
    assert "1/3" in text and ">" in text, "the wait of the one without a token is a lower bound"
    assert text.split()[3] == "500.0", "the median of waits of 0.5, 0.5 and 8 s"
    # The arrivals last 2 s, and the last 1.4 s of them count: 2 tokens came, 6 were requested.
    assert text.split()[-3:] == ["1", "33%", "33%"]


def test_pauses_of_the_giants_neighbours() -> None:
    giant = record(1.0, (1.9,), 1, prompt=5000)
    chat = record(0.0, (0.2, 0.3, 0.4, 1.4, 1.5, 9.0), 6)
    run = run_of([chat, giant], GIANT)
    seen = disturbance(run)
    assert seen.before_s == pytest.approx([0.1, 0.1]) and seen.after_s == pytest.approx([1.0, 0.1])
    assert seen.waited_s == pytest.approx(0.9) and "longest 1000 ms" in sentence(run)


def test_the_whole_command_on_the_hash_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "bench.gpu_comparison", *SMALL, f"--out={tmp_path}", "--budget=100"]
    loads = ["--loads", "fcfs=20,giant", "static=giant"]
    done = subprocess.run([*command, *loads], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = read_runs(tmp_path / "runs.jsonl.gz")
    assert [(run.header.system, run.header.settings["load"]) for run in runs] == [
        ("fcfs", "20"), ("fcfs", GIANT), ("static", GIANT),
    ]  # fmt: skip
    for run in runs:
        assert run.header.settings["policy"] == run.header.system
        assert run.requests and all(one.ok and one.output_tokens == one.wanted_tokens for one in run.requests)
        assert all(one.cached_tokens == 0 for one in run.requests), "no policy hits another's prefixes"
    in_force = [json.loads(str(run.header.settings["policy_parameters"])).get("step_tokens") for run in runs]
    assert in_force == [64, 64, None], "only fcfs gets a chunk size"
    assert done.stdout.count("the first token of 300 prompt tokens") == 2
    monkeypatch.setattr(sys, "argv", [*command[2:], *loads])
    with pytest.raises(SystemExit, match="choose another --out"):
        main()
    assert [path.name for path in write_pages(tmp_path, runs)] == ["rates.html", "giant.html"]
    assert not any("flash" in note for note in remarks(runs))
    runs[0].header.settings["attention"] = "paged|sdpa"
    assert any("by paged|sdpa: flash attention" in note for note in remarks(runs))
