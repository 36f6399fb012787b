"""Sends a load from several processes at a common start, and gathers what they saw."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_comparison.peers.workloads import Recipe
from roster_client.bench.load.load_run import LEAD_S
from roster_client.bench.records.record import RequestRecord, Run
from roster_client.bench.records.record_file import read_run
from roster_client.serve.child_process import ChildProcess, OnLine

START_DELAY_S = 0.3
POLL_S = 0.01
STOP_S = 2.0


class LoadFailed(RuntimeError):
    """Raised if a load did not complete; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server under load."""

    protocol: str
    """grpc or openai."""
    address: str
    model: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What all client processes saw of a load."""

    requests: list[RequestRecord]
    loop_delay_p99_s: float
    cpu_share: float
    """Of the busiest process."""


async def run_load(
    server: Server,
    recipe: Recipe,
    processes: int,
    on_line: OnLine,
    *,
    decode_rows: int = 0,
    whole: bool = False,
) -> Seen:
    """Runs a load to its end. Raises LoadFailed if a client process or a request fails.

    `whole`: a server with the OpenAI protocol does not stream its answers.
    """
    with tempfile.TemporaryDirectory(prefix="roster-load-") as folder:
        path = Path(folder) / "job"
        job = {
            "protocol": server.protocol,
            "address": server.address,
            "model": server.model,
            "recipe": recipe.plain(),
            "decode_rows": decode_rows,
            "whole": whole,
            "nonce": zlib.crc32(f"{recipe.part.title} {decode_rows} {time.monotonic_ns()}".encode()),
        }
        path.write_text(json.dumps(job))
        runs = await _gathered(path, processes, on_line)
    requests = [request for run in runs for request in run.requests]
    _check(requests)
    delays = [run.loop_delays for run in runs if run.loop_delays is not None]
    return Seen(
        sorted(requests, key=lambda one: one.scheduled_s),
        max(delay.p99_s for delay in delays),
        max(delay.cpu_share for delay in delays),
    )


async def _gathered(path: Path, processes: int, on_line: OnLine) -> list[Run]:
    records = [path.with_name(f"record-{share}.jsonl") for share in range(processes)]
    async with AsyncExitStack() as stack:
        clients = []
        for share, record in enumerate(records):
            module = "bench.gpu_comparison.peers.load_client"
            command = [sys.executable, "-m", module, str(path), str(share), str(processes), str(record)]
            client = await ChildProcess.start("client", command, on_line)
            stack.push_async_callback(client.stop, STOP_S)
            clients.append(client)
        while not all(path.with_name(f"{path.name}.ready-{share}").exists() for share in range(processes)):
            _check_clients(clients)
            await asyncio.sleep(POLL_S)
        start = path.with_name(f"{path.name}.start")
        part = start.with_suffix(".part")
        part.write_text(repr(time.monotonic() + START_DELAY_S + LEAD_S))
        part.rename(start)  # so that no process reads half a number
        for client in clients:
            await client.wait()
        await asyncio.sleep(0)
        _check_clients(clients)
    return [read_run(record) for record in records]


def _check_clients(clients: Sequence[ChildProcess]) -> None:
    for client in clients:
        if client.returncode:
            last = " | ".join(list(client.tail)[-3:]) or "it printed nothing"
            raise LoadFailed(f"a client process ended with status {client.returncode}: {last}")


def _check(requests: Sequence[RequestRecord]) -> None:
    """Raises LoadFailed unless every request got all of its tokens."""
    failed = [one for one in requests if not one.ok or one.output_tokens != one.wanted_tokens or not one.message_s]
    if failed:
        one = failed[0]
        why = one.error or f"{one.output_tokens} of {one.wanted_tokens} tokens came"
        raise LoadFailed(f"{len(failed)} of {len(requests)} requests failed, the first one: {why}")
