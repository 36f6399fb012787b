"""One call of the comparison with a peer: measures, within its budget, the parts that have no record yet."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu_comparison.budget import Budget
from bench.gpu_comparison.peers import measure
from bench.gpu_comparison.peers.load import LoadFailed
from bench.gpu_comparison.peers.log import Log
from bench.gpu_comparison.peers.options import settings
from bench.gpu_comparison.peers.parts import PEERS, Part, Stage, load_s, stages, start_s
from bench.gpu_comparison.peers.records import PeerRecord, append_record, card, read_records, used_mib
from bench.gpu_comparison.peers.servers import NotServing, Serving, flags_of, roster, vllm
from bench.gpu_comparison.peers.site import Unusable, found_site, unpacked_site
from roster_client.bench.runs import provenance

FREE_MIB = 4096
FREED_S = 30.0
LEAST_START_S = 20.0
STOPPING_S = 10.0
"""Seconds of a call that are kept for stopping the systems."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is the same for all parts of a call."""

    options: argparse.Namespace
    card_id: str
    card: str
    commit: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> Call:
        """Looks the card and the commit up."""
        return cls(options, *card(), provenance.commit() or "unknown")

    @property
    def path(self) -> Path:
        """The file of all records."""
        path: Path = self.options.out / "peer.jsonl"
        return path

    def log(self, system: str) -> Log:
        return Log(self.options.out / f"{system}.log")

    def record(self, part: Part, numbers: dict[str, Any], serving: Serving | None = None) -> PeerRecord:
        """Returns the record of a part."""
        return PeerRecord(
            card_id=self.card_id,
            card=self.card,
            shape=self.options.shape,
            system=part.system,
            load=part.load,
            settings={**settings(self.options), "flags": flags_of(self.options, part.system)},
            commit=self.commit,
            version=serving.version if serving else "",
            date=provenance.utc_now(),
            command=provenance.command_line("python -m bench.gpu_comparison"),
            start_s=serving.start_s if serving else 0.0,
            numbers=numbers,
            facts={**(serving.facts if serving else {}), "libraries": provenance.versions()},
        )

    def pending(self) -> list[Stage]:
        """Returns the stages without the parts that have a record. Raises ValueError for a broken file."""
        keys = {record.key for record in read_records(self.path)} if self.path.exists() else set()
        left = [part for part in self.options.parts if self.record(part, {}).key not in keys]
        return list(stages(left))


def print_plan(call: Call) -> None:
    """Prints the parts without a record, with estimated seconds, and how many calls of this budget they take."""
    shape, budget_s = call.options.shape, call.options.budget - STOPPING_S
    total_s, call_s, calls = 0.0, 0.0, 1
    pending = call.pending()
    print(f"{shape} on {call.card}; estimated seconds, and their sum in the call")
    for stage in pending:
        begun = False
        for part in stage.parts:
            seconds = load_s(shape, part) + (0.0 if begun else start_s(shape, stage))
            if call_s and call_s + seconds > budget_s:
                calls, call_s = calls + 1, 0.0
                seconds = load_s(shape, part) + start_s(shape, stage)
            begun = True
            total_s, call_s = total_s + seconds, call_s + seconds
            print(f"call {calls}  {part.title:28} {seconds:5.0f} {call_s:6.0f}")
    measured = len(call.options.parts) - sum(len(stage.parts) for stage in pending)
    print(f"{total_s:.0f} s in {calls} calls of at most {call.options.budget:.0f} s; {measured} parts have a record")


async def measure_all(call: Call) -> int:
    """Measures pending parts until the budget is spent; returns how many failed. Raises Unusable and ValueError."""
    options = call.options
    pending = call.pending()
    site = found_site(options.peer_site) if any(stage.system in PEERS for stage in pending) else None
    if options.device == "cuda" and provenance.gpu_card() is None:
        raise Unusable("this runs on a GPU, but nvidia-smi finds none: start it on a machine with a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    budget = Budget.of(options.budget - STOPPING_S)
    failed = 0
    try:
        async with asyncio.timeout(options.budget - STOPPING_S):
            for stage in pending:
                failed += await _stage(call, stage, site, budget)
    except TimeoutError:
        print("the budget is spent: the part in progress was ended; call again to measure the rest", flush=True)
    return failed


async def _stage(call: Call, stage: Stage, site: Path | None, budget: Budget) -> int:
    """Measures a stage's parts that fit; returns how many failed. A system that does not start fails all of them."""
    first_s = start_s(call.options.shape, stage) + load_s(call.options.shape, stage.parts[0])
    if first_s > budget.left_s:
        _leave_out(stage.parts, first_s, budget)
        return 0
    await _wait_free()
    log = call.log(stage.system)
    if not stage.parts[0].served:
        return await _own_process(call, stage.parts[0], log)
    failed = 0
    try:
        async with _server(call, stage, site, log, budget) as serving:
            print(f"{stage.system} {serving.version}: ready after {serving.start_s:.0f} s", flush=True)
            await measure.warm_up(call.options, serving, stage.system, log)
            for part in stage.parts:
                seconds = load_s(call.options.shape, part)
                if seconds > budget.left_s:
                    _leave_out([part], seconds, budget)
                else:
                    failed += await _served(call, serving, part, log)
    except (NotServing, LoadFailed, Unusable) as error:
        print(f"{stage.system}: {error}", flush=True)
        return len(stage.parts)
    return failed


async def _served(call: Call, serving: Serving, part: Part, log: Log) -> int:
    try:
        numbers = await measure.served_part(call.options, serving, part, log)
    except LoadFailed as error:
        print(f"{part.title}: {error}", flush=True)
        return 1
    _keep(call, call.record(part, numbers, serving))
    return 0


async def _own_process(call: Call, part: Part, log: Log) -> int:
    try:
        numbers = await measure.own_process_part(call.options, part, log)
    except LoadFailed as error:
        print(f"{part.title}: {error}", flush=True)
        return 1
    _keep(call, replace(call.record(part, numbers), version=own_version(part)))
    return 0


def own_version(part: Part) -> str:
    """Returns the version of a system that is a library of this Python."""
    package = "transformers" if part.system == "transformers" else "roster-serve"
    return provenance.versions([package]).get(package, "unknown")


@asynccontextmanager
async def _server(call: Call, stage: Stage, site: Path | None, log: Log, budget: Budget) -> AsyncIterator[Serving]:
    """Starts the stage's server; it may take what the budget leaves beside the first part."""
    options = call.options
    limit_s = max(LEAST_START_S, budget.left_s - load_s(options.shape, stage.parts[0]))
    server: AbstractAsyncContextManager[Serving]
    if stage.system in PEERS:
        assert site is not None, "a call with a peer has found its site"
        folder = await asyncio.to_thread(unpacked_site, site)
        server = vllm(options, stage.system, folder, log, limit_s)
    else:
        server = roster(options, stage.system, log, limit_s)
    async with server as serving:
        yield serving


async def _wait_free() -> None:
    """Waits until an ended system's GPU memory is free; the next one sizes its cache by what it finds."""
    end_s = time.monotonic() + FREED_S
    while (used := await asyncio.to_thread(used_mib)) > FREE_MIB and time.monotonic() < end_s:
        await asyncio.sleep(0.5)
    if used > FREE_MIB:
        print(f"another process uses {used} MiB of the GPU: numbers will suffer", flush=True)


def _keep(call: Call, record: PeerRecord) -> None:
    append_record(call.path, record)
    print(f"{record.system}, {record.load}: {summary(record)}", flush=True)


def summary(record: PeerRecord) -> str:
    """Returns a record's numbers in a line."""
    numbers = record.numbers
    if "step_ms" in numbers:
        return ", ".join(f"{rows} rows {value:.3g} ms" for rows, value in numbers["step_ms"].items())
    ttft, itl = numbers["ttft_ms"], numbers["itl_ms"]
    itls = f", ITL p50 {itl['p50']:.2f}, p99 {itl['p99']:.1f}" if itl else ""
    return (
        f"{numbers['seconds']:.2f} s, {numbers['tokens_per_s']:.0f} tokens/s, TTFT p50 {ttft['p50']:.1f}, "
        f"p99 {ttft['p99']:.0f}{itls}, client late p99 {numbers['client_late_ms']['p99']:.1f} ms"
    )


def _leave_out(parts: Iterable[Part] | Sequence[Part], needed_s: float, budget: Budget) -> None:
    titles = "; ".join(part.title for part in parts)
    print(f"left for another call: {titles}: {needed_s:.0f} s are needed, {budget.left_s:.0f} s are left", flush=True)
