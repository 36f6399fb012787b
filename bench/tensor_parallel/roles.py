"""Measures streams that decode while long prompts arrive: a runner for prompts and one for decoding, against one alone.

    python -m bench.tensor_parallel.roles --shape llama-3.1-8b

`--streams` decode all the time; then prompts of `--shortest` to `--longest` tokens arrive by Poisson at `--rate` for
`--seconds`. ITL is of the streams alone, TTFT of the arrivals, both of requests to one scheduler.

| system | runners |
|---|---|
| `alone` | one, and nothing arrives |
| `roles` | one with `--role prefill`, one with `--role decode`, to which KV moves: through memory that two GPUs share |
| `mixed` | one, which computes prompts and decodes in the same steps |

Each runner has a GPU; with `--gpus 1` they share one, to try the command: times then say nothing. So do they with
`--device cpu --model smollm2`, which takes a smaller load, or with `--device hash`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.common.fleet import Fleet
from bench.common.on_gpu import require_gpu
from bench.common.provenance import on_card, provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.gpu_serving.client import ClientRecord, Clients, phase_times
from bench.gpu_serving.service import card_of
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_protos import admin_pb2

ALONE, ROLES, MIXED = "alone", "roles", "mixed"
RUNNERS = {ALONE: {"a": "both"}, ROLES: {"a": "prefill", "b": "decode"}, MIXED: {"a": "both"}}
"""Names and roles of each system's runners. The last one decodes."""
SESSIONS = 4
SETTLED_TOKENS, SETTLED_S = 32, 120.0
"""Tokens that each stream has before the measurement begins, and seconds in which all have them."""


def settings_of(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Returns the settings that all runners share."""
    slots = arguments.streams + arguments.room
    found: dict[str, object] = {"device": arguments.device, "slots": slots, "move_listen": "127.0.0.1:0"}
    if arguments.device == "cuda":
        write_folder(arguments.shape, folder / arguments.shape)
        memory = 0.9 if arguments.gpus > 1 else 0.45
        return found | {"model": folder / arguments.shape, "weights": "random", "gpu_memory": memory}
    steady = arguments.streams * (arguments.prompt + arguments.tokens)
    found["kv_tokens"] = steady + arguments.room * (arguments.longest + arguments.answer)
    if arguments.device == "hash":
        return found | {"model": "hash", "test_backend": {"step_ms": 5, "eos_probability": 0}}
    return found | {"model": arguments.model, "threads": 1}


def gaps_within(record: ClientRecord, begin_ns: int, end_ns: int) -> NDArray[np.float64]:
    """Returns the milliseconds between neighbouring messages of a stream, of those with both in this time."""
    inside = (record.delta_times >= begin_ns) & (record.delta_times <= end_ns)
    requests, times = record.delta_requests[inside], record.delta_times[inside]
    order = np.lexsort((times, requests))
    requests, times = requests[order], times[order]
    gaps: NDArray[np.float64] = np.diff(times)[np.diff(requests) == 0] / 1e6
    return gaps


def first_waits(record: ClientRecord) -> NDArray[np.float64]:
    """Returns the milliseconds from each request's due time to its first token."""
    order = np.lexsort((record.delta_times, record.delta_requests))
    requests, times = record.delta_requests[order], record.delta_times[order]
    first = np.flatnonzero(np.diff(requests, prepend=-1))
    waits: NDArray[np.float64] = (times[first] - record.due[requests[first]]) / 1e6
    return waits


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Returns percentiles. Raises ValueError if there is no value."""
    if not len(values):
        raise ValueError("nothing was measured: choose a longer time or more streams")
    return {"p50": float(np.median(values)), "p99": float(np.percentile(values, 99)), "worst": float(values.max())}


def moved(before: admin_pb2.Moves, after: admin_pb2.Moves) -> dict[str, Any]:
    """Returns what moved between two states of one scheduler. GB/s are those of a copy."""
    by_way = {way: count - before.bytes[way] for way, count in after.bytes.items()}
    sequences, copy_s = after.sequences - before.sequences, after.copy_s - before.copy_s
    return {
        "sequences": sequences,
        "failed": after.failed - before.failed,
        "bytes": by_way,
        "gb_s": sum(by_way.values()) / copy_s / 1e9 if copy_s > 0 else None,
        "pause_ms": (after.pause_s - before.pause_s) * 1e3 / sequences if sequences else None,
    }


async def settled(steady: Clients, admin: AdminClient, decoder: str, count: int) -> None:
    """Waits until all streams decode on the runner `decoder`. Raises RuntimeError if that takes too long."""
    until_s = time.monotonic() + SETTLED_S
    while time.monotonic() < until_s:
        record = steady.record()
        had = np.bincount(record.delta_requests, record.delta_tokens, minlength=count)
        running = {runner.id: runner.running for runner in (await admin.get_status(deadline_s=10)).runners}
        if had.min() >= SETTLED_TOKENS and running[decoder] == count == sum(running.values()):
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"after {SETTLED_S:.0f} s the runners have {running}, instead of {count} streams on {decoder}")


async def measured(arguments: argparse.Namespace, folder: Path, system: str) -> dict[str, Any]:
    """Serves by the system's runners, and returns its figures."""
    runners = RUNNERS[system]
    roles = {name: role for name, role in runners.items() if role != "both"}
    gpus = arguments.gpus if arguments.device == "cuda" and len(runners) > 1 else 1
    fleet = Fleet(settings_of(arguments, folder), gpus=gpus, roles=roles)
    try:
        for name in ("scheduler", *runners):
            await fleet.start(name)
        ends = fleet.endpoints
        async with RosterClient(ends.listen) as client, AdminClient(ends.admin_listen) as admin:
            vocab_size = (await fleet.ready(client, admin, len(runners))).vocab_size
            found = await loaded(arguments, system, ends.listen, admin, vocab_size)
        return {"system": system, "runners": runners, **found}
    finally:
        await fleet.stop()


async def loaded(
    arguments: argparse.Namespace, system: str, address: str, admin: AdminClient, vocab_size: int
) -> dict[str, Any]:
    """Loads a service that is ready."""
    rng, count = np.random.default_rng(arguments.seed), arguments.streams
    due = phase_times([arguments.rate], arguments.seconds, arguments.seed) if system != ALONE else []
    lengths = rng.integers(arguments.shortest, arguments.longest + 1, len(due)).tolist()
    arrivals = Clients(address, [(length, arguments.answer) for length in lengths], vocab_size, 1)
    steady = Clients(address, [(arguments.prompt, arguments.tokens)] * count, vocab_size, 2)
    await Clients(address, [(arguments.longest, 8)] * 2, vocab_size, 3).run([0.0] * 2, 1)  # warms up
    streams = asyncio.create_task(steady.run([0.0] * count, SESSIONS))
    try:
        await settled(steady, admin, list(RUNNERS[system])[-1], count)
        before, begin_ns = await admin.get_status(deadline_s=10), time.monotonic_ns()
        end_ns = begin_ns + int(arguments.seconds * 1e9)
        others = await arrivals.run(due, SESSIONS) if due else None
        await asyncio.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))
        if streams.done():
            raise RuntimeError("a stream ended before the measurement did: raise --tokens or lower --seconds")
        after, record = await admin.get_status(deadline_s=10), steady.record()
    finally:
        streams.cancel()
        with suppress(asyncio.CancelledError):
            await streams
    return {
        "itl_ms": spread(gaps_within(record, begin_ns, end_ns)),
        "arrivals": len(due),
        "prompt_tokens": sum(lengths),
        "ttft_ms": spread(first_waits(others)) if others else None,
        "moves": moved(before.moves, after.moves),
        "client_lag_ms": spread(record.loop_lag / 1e6),
    }


def sentence(line: dict[str, Any], alone: dict[str, Any] | None) -> str:
    """Describes a system's figures."""
    itl, ttft, moves = line["itl_ms"], line["ttft_ms"], line["moves"]
    said = f"{line['system']}: ITL p50 {itl['p50']:.2f}, p99 {itl['p99']:.2f}, worst {itl['worst']:.1f} ms"
    if alone is not None and alone is not line:
        shares = {name: itl[name] / alone["itl_ms"][name] for name in ("p50", "p99")}
        said += f" ({shares['p50']:.3f} and {shares['p99']:.3f} of alone)"
    if ttft:
        said += f"; TTFT of {line['arrivals']} prompts p50 {ttft['p50']:.0f}, p99 {ttft['p99']:.0f} ms"
    if moves["sequences"]:
        rate = f", {moves['gb_s']:.1f} GB/s" if moves["gb_s"] else ""
        said += f"; {moves['sequences']} moved {moves['bytes']}{rate}, paused {moves['pause_ms']:.1f} ms (mean)"
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=sorted(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu", "hash"), default="cuda")
    parser.add_argument("--model", default="smollm2", help="with --device cpu (default: smollm2)")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2)
    parser.add_argument("--streams", type=int, default=64, help="that decode all the time (default: 64)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each stream's prompt (default: 1024)")
    parser.add_argument("--tokens", type=int, default=12_000, help="that a stream may get at most (default: 12000)")
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second (default: 2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals, and of ITL (default: 30)")
    parser.add_argument("--shortest", type=int, default=2048, help="tokens of arriving prompts (default: 2048)")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of arriving prompts (default: 8192)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of arrivals' answers (default: 64)")
    parser.add_argument("--room", type=int, default=64, help="slots besides those of the streams (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu(arguments.device)
    source = provenance("bench.tensor_parallel.roles", ["torch", "cupy", "numpy"])
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for system in arguments.systems:
            lines.append(uvloop.run(measured(arguments, Path(folder), system)))
            alone = next((line for line in lines if line["system"] == ALONE), None)
            print(sentence(lines[-1], alone), flush=True)
            if arguments.output:  # what was measured is kept if the next system does not end in time
                write_results(arguments.output, on_card(source, card_of(arguments.device)), {"lines": lines})


if __name__ == "__main__":
    main()
