"""Computes the numbers of a load from the records of clients and runner, and prints their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu_serving.client import ClientRecord
from bench.gpu_serving.step_record import StepRecord
from scheduler_svc.simulator.calibration.cost_fit import TimedStep
from scheduler_svc.simulator.cost_model import StepWork

PERCENTILES = (50, 90, 99)
WIDTH = 34
"""Of the column of loads."""

SAMPLED_STEPS = 100
VLLM_OFFLINE_S = {"llama-3.1-8b": 25.96, "qwen3-0.6b": 6.4, "qwen3-30b-a3b": 23.9}
"""Seconds of vLLM 0.25.0 on another H200 for the same 512 requests, all at once."""
OFFLINE_BAR_S = {"llama-3.1-8b": 23.0, "qwen3-0.6b": 5.0, "qwen3-30b-a3b": 18.0}
VLLM_ONLINE_MS = {
    ("llama-3.1-8b", 8.0): (44, 212, 5.6, 68),
    ("llama-3.1-8b", 14.0): (69, 272, 6.4, 94),
    ("llama-3.1-8b", 18.0): (109, 518, 7.9, 165),
    ("qwen3-0.6b", 30.0): (39, 111, 2.8, 34),
    ("qwen3-0.6b", 55.0): (68, 139, 5.7, 34),
}
"""vLLM's server under the same arrivals: TTFT p50, p99, ITL p50, p99."""
ONLINE_BARS_MS = {
    ("llama-3.1-8b", 8.0): (35, 30),
    ("llama-3.1-8b", 14.0): (55, 40),
    ("llama-3.1-8b", 18.0): (90, 60),
    ("qwen3-0.6b", 30.0): (15, 12),
    ("qwen3-0.6b", 55.0): (25, 15),
}
"""Bars of TTFT p50 and ITL p99."""
IDLE_BARS_US = (15.0, 50.0)
"""Bars of the GPU's idle time between decode steps, p50 and p99."""


def percentiles(values: NDArray[Any], scale: float = 1.0) -> dict[str, float]:
    """Returns the mean and percentiles of `values` times `scale`, {} if there are none."""
    if not len(values):
        return {}
    row = {"mean": float(np.mean(values)) * scale}
    return row | {f"p{p}": float(np.percentile(values, p)) * scale for p in PERCENTILES}


def client_numbers(record: ClientRecord) -> dict[str, Any]:
    """Returns TTFT from the time at which a request was due, ITL between a request's deltas at the client, and TPOT,
    the mean time of a request's tokens behind its first delta."""
    order = np.lexsort((record.delta_times, record.delta_requests))
    requests, times = record.delta_requests[order], record.delta_times[order]
    firsts = np.flatnonzero(np.diff(requests, prepend=-1))
    lasts = np.append(firsts[1:] - 1, len(requests) - 1)
    between = np.diff(times)[np.diff(requests) == 0]
    tokens = int(record.delta_tokens.sum())
    behind = np.bincount(requests, record.delta_tokens[order])[requests[firsts]] - record.delta_tokens[order][firsts]
    tpot = ((times[lasts] - times[firsts]) / np.maximum(1, behind))[behind > 0]
    seconds = (int(times.max()) - int(record.due.min())) / 1e9
    return {
        "requests": len(record.due),
        "prompt_tokens": int(record.prompt_tokens.sum()),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "tokens_per_delta": tokens / len(times),
        "ttft_ms": percentiles(times[firsts] - record.due, 1e-6),
        "itl_ms": percentiles(between, 1e-6),
        "tpot_ms": percentiles(tpot, 1e-6),
        "whole_ms": percentiles(times[lasts] - record.due, 1e-6),
        "client_late_ms": percentiles(record.sent - record.due, 1e-6),
        "client_loop_lag_ms": percentiles(record.loop_lag, 1e-6),
    }


def progress_line(name: str, record: ClientRecord) -> str:
    """Returns a line about a load that has just ended."""
    numbers = client_numbers(record)
    ttft, itl, tpot = numbers["ttft_ms"], numbers["itl_ms"], numbers["tpot_ms"]
    return (
        f"{name:{WIDTH}} {numbers['seconds']:6.2f} s, TTFT p50 {ttft['p50']:.1f}, p99 {ttft['p99']:.0f}, "
        f"ITL p50 {itl['p50']:.2f}, p99 {itl['p99']:.1f} ms, TPOT p50 {tpot['p50']:.3f}, p99 {tpot['p99']:.2f} ms, "
        f"{numbers['output_tokens_per_s']:.0f} tok/s"
    )


def step_numbers(steps: StepRecord, depth: int) -> dict[str, Any]:
    """Returns the GPU's busy and idle times and step times during a load."""
    if not len(steps.rows):
        return {}
    mixed, verifying = steps.mixed, steps.verifying
    whole = (steps.forward + steps.sample) / 1e6
    numbers: dict[str, Any] = {
        "steps": len(steps.rows),
        "mixed_steps": int(mixed.sum()),
        "gpu_busy_s": float(whole.sum()) / 1e3,
        "idle_s": float(steps.idle[1:].sum()) / 1e9,
        "decode_step_ms": percentiles(whole[~mixed & ~verifying]),
        "mixed_step_ms": percentiles(whole[mixed]),
        "positions_per_mixed_step": percentiles(steps.positions[mixed]),
        "rows": percentiles(steps.rows),
    }
    if verifying.any():
        numbers["verify_step_ms"] = percentiles(whole[verifying])
        numbers["drafted"], numbers["accepted"] = int(steps.drafted.sum()), int(steps.accepted.sum())
    numbers["host_us"] = {name: percentiles(values) for name, values in steps.host_parts_us(depth).items()}
    return numbers


def sampled_steps(steps: StepRecord) -> list[str]:
    """Returns up to SAMPLED_STEPS mixed steps and as many decode steps, spread over the load, as one line each:
    positions, rows, context, prefill pairs, milliseconds. `timed_step` parses them. The first step is left out, as it
    may be partial, and so are those with drafts."""
    columns = (steps.positions, steps.rows, steps.context, steps.prefill_pairs, (steps.forward + steps.sample) / 1e6)
    plain = ~steps.verifying[1:]
    table, mixed = np.column_stack(columns)[1:][plain], steps.mixed[1:][plain]
    chosen = np.concatenate([_spread(table[kind], SAMPLED_STEPS) for kind in (mixed, ~mixed)])
    return ["{:.0f} {:.0f} {:.0f} {:.0f} {:.3f}".format(*row) for row in chosen]


def timed_step(line: str) -> TimedStep:
    """Parses a line of `sampled_steps`."""
    positions, rows, context, pairs, milliseconds = line.split()
    return TimedStep(StepWork(int(positions), int(rows), int(context), float(pairs)), float(milliseconds) / 1e3)


def _spread(rows: NDArray[Any], most: int) -> NDArray[Any]:
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


def decode_numbers(steps: StepRecord, batch: int, depth: int) -> dict[str, Any]:
    """Returns the GPU's idle time between full decode steps, and the host's time by stage."""
    full = steps.full_decode(batch)
    return {
        "batch": batch,
        "steps": len(full.rows),
        "idle_us": percentiles(full.idle, 1e-3) | {"max": float(full.idle.max()) / 1e3 if len(full.idle) else 0.0},
        "step_ms": percentiles(full.forward + full.sample, 1e-6),
        "prepare_us": percentiles(full.prepare, 1e-3),
        "host_us": {name: percentiles(values) for name, values in full.host_parts_us(depth).items()},
    }


def boundary_gaps(times_us: NDArray[np.float64], names: Sequence[str]) -> NDArray[np.float64]:
    """Returns, from a profile, the µs between the last kernel of each step and the first of the next.

    A step begins and ends with a copy of its words, so two consecutive copies mark the end of a step.
    """
    order = np.argsort(times_us[:, 0])
    times = times_us[order]
    copies = np.array(["copy_words" in names[index] for index in order], bool)
    ends = np.flatnonzero(copies[:-1] & copies[1:])
    return times[ends + 1, 0] - times[ends, 1]


def print_offline(shape: str, loads: Sequence[dict[str, Any]]) -> None:
    """Prints one line per load."""
    if loads:
        print(f"\n{shape}, all at once: vLLM {VLLM_OFFLINE_S[shape]} s, bar {OFFLINE_BAR_S[shape]} s")
        print(f"{'load':{WIDTH}} seconds  out tok/s  all tok/s   GPU busy s  idle s  steps  mixed, decode ms p50")
    for load in loads:
        steps = load.get("runner", {})
        total = (load["prompt_tokens"] + load["output_tokens"]) / load["seconds"]
        print(
            f"{load['load']:{WIDTH}} {load['seconds']:7.2f} {load['output_tokens_per_s']:10.0f} {total:10.0f} "
            f"{steps.get('gpu_busy_s', 0):12.2f} {steps.get('idle_s', 0):7.2f} {steps.get('steps', 0):6} "
            f"{_median(steps, 'mixed_step_ms'):8.2f} {_median(steps, 'decode_step_ms'):8.2f}"
        )


def print_online(shape: str, loads: Sequence[dict[str, Any]]) -> None:
    """Prints one line per load, with vLLM's numbers and the bars."""
    if loads:
        print(f"\n{shape}, Poisson; ms")
        print(
            f"{'load':{WIDTH}} TTFT p50    p99   ITL p50    p99   out tok/s  tok/delta  client late/lag p99  "
            "vLLM TTFT p50 p99 ITL p50 p99   bars TTFT p50, ITL p99"
        )
    for load in loads:
        ttft, itl = load["ttft_ms"], load["itl_ms"]
        vllm = VLLM_ONLINE_MS.get((shape, load["rate"]), ("", "", "", ""))
        bars = ONLINE_BARS_MS.get((shape, load["rate"]))
        verdict = (
            ""
            if bars is None
            else f"{bars[0]} {_verdict(ttft['p50'], bars[0])}, {bars[1]} {_verdict(itl['p99'], bars[1])}"
        )
        print(
            f"{load['load']:{WIDTH}} {ttft['p50']:8.1f} {ttft['p99']:6.0f} {itl['p50']:9.2f} {itl['p99']:6.1f} "
            f"{load['output_tokens_per_s']:11.0f} {load['tokens_per_delta']:10.2f} "
            f"{load['client_late_ms']['p99']:9.2f} / {load['client_loop_lag_ms']['p99']:5.2f}      "
            f"{' '.join(map(str, vllm)):28} {verdict}"
        )


def print_decode(shape: str, loads: Sequence[dict[str, Any]]) -> None:
    """Prints the GPU's idle time and the host's microseconds."""
    for load in loads:
        idle = load["decode"]["idle_us"]
        if idle.get("p50") is None:
            print(f"\n{shape}, {load['load']}: no full decode step was seen")
            continue
        print(
            f"\n{shape}, {load['load']}: {load['decode']['steps']} full decode steps of "
            f"{load['decode']['step_ms']['p50']:.3f} ms (p50); GPU idle before them, µs: p50 {idle['p50']:.1f} "
            f"({_verdict(idle['p50'], IDLE_BARS_US[0])} {IDLE_BARS_US[0]:g}), p99 {idle['p99']:.1f} "
            f"({_verdict(idle['p99'], IDLE_BARS_US[1])} {IDLE_BARS_US[1]:g}), max {idle['max']:.0f}"
        )
        if load.get("profiler_gap_us"):
            gaps = load["profiler_gap_us"]
            print(f"  torch's profiler, {load['profiler_steps']} gaps: p50 {gaps['p50']:.1f}, p99 {gaps['p99']:.1f} µs")
        for name, values in load["decode"]["host_us"].items():
            if values:
                print(f"  {name:20} µs: mean {values['mean']:7.0f}  p50 {values['p50']:7.0f}  p99 {values['p99']:7.0f}")


def _median(numbers: dict[str, Any], name: str) -> float:
    """Returns a measure's median, 0 if there is none."""
    return float(numbers.get(name, {}).get("p50", 0.0))


def _verdict(value: float, bar: float) -> str:
    return "met" if value <= bar else "MISSED"
