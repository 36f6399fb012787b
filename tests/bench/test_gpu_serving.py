"""Serving benchmark for GPUs: the numbers from its records, and the whole command on a runner without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.common.traces import TRACES, trace_lengths
from bench.gpu_serving import report
from bench.gpu_serving.__main__ import parse_arguments
from bench.gpu_serving.client import ClientRecord, arrival_times, phase_times
from bench.gpu_serving.loads import loads_of, split_spec
from bench.gpu_serving.pairs import verdict
from bench.gpu_serving.service import Scheduling
from bench.gpu_serving.step_record import StepRecord

MS = 1_000_000


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_lengths_of_a_trace_are_capped() -> None:
    path = TRACES / "azure_conv_2023_busiest2000.csv"
    lengths = trace_lengths(path, 512, 4096)
    assert (len(lengths), sum(p for p, _ in lengths), sum(o for _, o in lengths)) == (512, 733_177, 73_760)
    assert max(prompt for prompt, _ in trace_lengths(path, 512, 100)) == 100


def test_arrivals() -> None:
    assert arrival_times(3, 0.0, seed=1) == [0.0, 0.0, 0.0]
    times = arrival_times(2000, 8.0, seed=1)
    assert times[0] == 0.0 and times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(8.0, rel=0.1)


def test_arrivals_whose_rate_rises() -> None:
    times = phase_times([2, 8, 22], 1.5, seed=3)
    assert times == sorted(times) == phase_times([2, 8, 22], 1.5, seed=3) != phase_times([2, 8, 22], 1.5, seed=4)
    assert np.histogram(times, [0, 1.5, 3, 4.5])[0].tolist() == [3, 12, 33]


def test_pairs_are_compared_one_by_one() -> None:
    def side(ttft: float, tpot: float, tail: float) -> dict[str, dict[str, float]]:
        return {"ttft_ms": {"p50": ttft}, "tpot_ms": {"p50": tpot, "p99": tail}}

    both = [{True: side(20.2, 2.0, 12.0), False: side(20.0, 4.0, 10.0)} for _ in range(2)]
    both.append({True: side(90.0, 8.0, 10.0), False: side(10.0, 4.0, 10.0)})
    ttft, tpot, tail = verdict(both)
    assert ttft == "ttft_ms p50  1.010 1.010 9.000   median 1.010, bar 1.03 met"
    assert tpot.endswith("median 0.500, bar 1.03 met") and tail.endswith("median 1.200, bar 1.10 MISSED")


def test_what_a_client_sees(tmp_path: Path) -> None:
    record = ClientRecord(
        due=int64(0, 10 * MS),
        sent=int64(1 * MS, 10 * MS),
        prompt_tokens=int64(5, 7),
        delta_requests=int64(0, 1, 0, 1, 0),
        delta_times=int64(30, 35, 40, 55, 60) * MS,
        delta_tokens=int64(1, 1, 2, 1, 1),
        loop_lag=int64(0, MS),
    )
    record.save(tmp_path / "record.npz")
    numbers = report.client_numbers(ClientRecord.load(tmp_path / "record.npz"))
    assert numbers["output_tokens"] == 6 and numbers["seconds"] == pytest.approx(0.06)
    assert numbers["ttft_ms"]["mean"] == pytest.approx((30 + 25) / 2)
    assert numbers["itl_ms"]["mean"] == pytest.approx((10 + 20 + 20) / 3)
    assert numbers["tpot_ms"]["mean"] == pytest.approx((30 / 3 + 20 / 1) / 2)
    assert numbers["whole_ms"]["mean"] == pytest.approx((60 + 45) / 2)
    assert numbers["client_late_ms"]["p50"] == pytest.approx(0.5)


def test_only_decode_steps_behind_one_of_the_same_rows_count() -> None:
    sizes = [(2, 9), (2, 2), (2, 2), (2, 2), (1, 1), (2, 2), (2, 2)]
    rows = [
        [*size, 70, 80, *[10 * step + i for i in range(5)], step, 1, 2, 3, 0, 0, 0] for step, size in enumerate(sizes)
    ]
    steps = StepRecord.of([*rows, [1, 2, 3]])  # the last one was cut off
    assert steps.full_decode(2).idle.tolist() == [2, 3, 6]
    assert steps.between(10, 31).rows.tolist() == [2, 2, 2]
    assert steps.host_parts_us(2)["engine's turn"].tolist() == [0.016] * 5


def test_steps_of_both_kinds_are_sampled_over_the_whole_load() -> None:
    rows = [
        [2, 2 + step % 2 * 100, 1000 + step, step, 0, 0, 0, 0, 0, 0, 0, 2 * MS, MS, 0, 0, 0] for step in range(4001)
    ]
    sampled = [report.timed_step(line) for line in report.sampled_steps(StepRecord.of(rows))]
    tokens, pairs = [step.work.tokens for step in sampled], [step.work.prefill_pairs for step in sampled]
    assert tokens == [102] * report.SAMPLED_STEPS + [2] * report.SAMPLED_STEPS
    assert min(pairs) <= 2 and max(pairs) >= 3999
    assert all(step.seconds == 0.003 and step.work.context_tokens == 1000 + step.work.prefill_pairs for step in sampled)
    assert len(report.sampled_steps(StepRecord.of(rows[:5]))) == 4
    verifying = [2, 8, 1000, 0, 0, 0, 0, 0, 0, 0, 0, 3 * MS, MS, 6, 5, 4]
    steps = StepRecord.of([*rows[:5], verifying])
    assert steps.mixed.tolist() == [False, True, False, True, False, False]
    assert report.sampled_steps(steps) == report.sampled_steps(StepRecord.of(rows[:5])), "no costs of plain steps"
    numbers = report.step_numbers(steps, 1)
    assert (numbers["drafted"], numbers["accepted"], numbers["verify_step_ms"]["p50"]) == (5, 4, 4)
    assert numbers["decode_step_ms"]["p99"] == 3 and numbers["mixed_steps"] == 2


def test_gaps_of_a_profile_lie_between_the_copies_of_two_steps() -> None:
    names = ["copy_words", "gemm", "copy_words", "copy_words", "gemm", "copy_words"]
    times = np.array([(0, 1), (1, 5), (5, 6), (16, 17), (17, 20), (20, 21)], float)
    order = np.random.default_rng(0).permutation(len(names))
    assert report.boundary_gaps(times[order], [names[index] for index in order]).tolist() == [10.0]


def test_a_load_brings_settings_of_its_own() -> None:
    assert split_spec("8:160:1024") == (["8", "160", "1024"], {})
    fields, changes = split_spec("ljf:1024,depth=3,plan_lead_ms=2,victim=least_computed,finish_tokens=1152")
    assert fields == ["ljf", "1024"]
    changed = Scheduling("ljf", '{"step_tokens": 1024}', 2, ("--a",)).changed(changes)
    assert (changed.depth, changed.flags) == (3, ("--a", "--plan-lead-ms=2"))
    values = {"step_tokens": 1024, "victim": "least_computed", "finish_tokens": 1152}
    assert json.loads(changed.policy_parameters) == values
    with pytest.raises(ValueError, match="'depth' of the load '8:160:1024,depth' has no value"):
        split_spec("8:160:1024,depth")


def test_variants_repeat_the_loads_with_flags_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = "tuned: --policy sjf --policy-parameters '{\"step_tokens\": 64}' --plan-lead-ms=2 --depth 3 --offline ljf:9"
    command = ["--online", "8", "14:20:256", "--seconds", "10", "--variant", "default:", "--variant", tuned]
    monkeypatch.setattr(sys, "argv", ["gpu_serving", *command])
    default, sized, *rest = loads_of(parse_arguments())
    assert [default.name, sized.name] == ["default: 8/s", "default: 14/s, 256 a step"]
    assert (default.requests, default.scheduling.policy, default.scheduling.depth) == (80, None, None)
    assert (sized.scheduling.policy, sized.scheduling.policy_parameters) == ("fcfs", '{"step_tokens": 256}')
    assert [load.name for load in rest][::2] == ["tuned: 8/s", "tuned: offline, ljf, 9 a step"]
    expected = Scheduling("sjf", '{"step_tokens": 64}', 3, ("--no-prefix-sharing", "--plan-lead-ms=2"))
    assert rest[0].scheduling == expected
    monkeypatch.setattr(sys, "argv", ["gpu_serving", "--variant", "--policy fcfs"])
    with pytest.raises(ValueError, match="has no name: write"):
        loads_of(parse_arguments())


def test_the_command_runs_without_a_gpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.gpu_serving",
        "--device=null",
        "--offline=ljf:64,finish_tokens=96,depth=1",
        "--requests=8",
        "--slots=16",
    ]
    run = subprocess.run([*command, f"--json={tmp_path / 'out.json'}"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    (load,) = json.loads((tmp_path / "out.json").read_text())["loads"]
    assert load["output_tokens"] == sum(
        output for _, output in trace_lengths(TRACES / "azure_conv_2023_busiest2000.csv", 8, 4096)
    )
    assert load["runner"]["steps"] > 0
    assert load["scheduler"]["depth"] == 1 and "finish_tokens" in load["scheduler"]["parameters"]
