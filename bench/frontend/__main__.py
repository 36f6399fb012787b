"""Measures the cost of streaming: tokens/s over gRPC to 256 clients, CPU per token, and the delay of the engine.

Starts `roster-scheduler`, a null runner with a fixed step time and the clients as separate processes, and measures
three loads of 256 concurrent requests: without listeners (requests are kept without a stream), Generate with one
connection per client, and Session. Prints CPU-µs per token, summed over the processes of the scheduler service, and
beside it those of the null runner and the clients.

The engine's turnaround is measured at the runner: from sending a result to receiving the plan that the result allows.
The delay that streams cause is the difference from the load without listeners, percentile by percentile.

    python -m bench.frontend [--seconds 10] [--step-ms 5] [--workers 1] [--sessions 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from bench.common.provenance import provenance, write_results
from roster_client.serve.stack import Endpoints
from roster_protos import admin_pb2, admin_pb2_grpc

WARM_UP_S = 3.0
BARS = {"generate": 28.0, "session": 10.0}
"""CPU-µs per token."""
TOKENS_PER_S_BAR = 35_000
LATE_MS_BARS = {50: 0.3, 99: 3.0}
PACKAGES = ("grpcio", "protobuf", "uvloop", "pyzmq")


@dataclass(frozen=True)
class Load:
    """Measurements of one load."""

    name: str
    tokens_per_s: float
    tokens_per_message: float
    cpu_us: dict[str, float]
    """CPU-µs per token of "engine", "workers", "runner" and "clients"."""
    turnaround_ms: np.ndarray

    def record(self) -> dict[str, Any]:
        """Returns the numbers, ready for JSON."""
        return {
            "load": self.name,
            "tokens_per_s": round(self.tokens_per_s),
            "tokens_per_message": round(self.tokens_per_message, 1),
            "service_us_per_token": round(self.service_us, 1),
            "cpu_us_per_token": {part: round(value, 1) for part, value in self.cpu_us.items()},
            "turnaround_ms": {f"p{p}": round(float(np.percentile(self.turnaround_ms, p)), 2) for p in LATE_MS_BARS},
        }

    @property
    def service_us(self) -> float:
        """CPU-µs per token of the scheduler service."""
        return self.cpu_us["engine"] + self.cpu_us["workers"]


@dataclass(frozen=True)
class Stack:
    """The running processes."""

    scheduler: psutil.Process
    runner: psutil.Process
    turnarounds: Path
    endpoints: Endpoints

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds used so far, by process group."""
        return {
            "engine": _cpu_s(self.scheduler),
            "workers": sum(_cpu_s(child) for child in self.scheduler.children(recursive=True)),
            "runner": _cpu_s(self.runner),
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def running_stack(arguments: argparse.Namespace, folder: Path) -> Iterator[Stack]:
    """Starts the scheduler service and a null runner."""
    endpoints = Endpoints.free()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
    scheduler = subprocess.Popen(
        [
            *(sys.executable, "-m", "scheduler_svc.main", f"--listen={endpoints.listen}", f"--link={endpoints.link}"),
            *(f"--admin-listen={endpoints.admin_listen}", "--metrics-listen=", f"--front-workers={arguments.workers}"),
            *(f"--depth={arguments.depth}", "--profile=throughput", "--log-level=warning"),
        ],
        env=environment,
    )
    turnarounds = folder / "turnarounds"
    runner = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "bench.frontend.runner",
                f"--link={endpoints.link}",
                f"--slots={arguments.clients}",
            ),
            *(f"--step-ms={arguments.step_ms}", f"--depth={arguments.depth}", f"--out={turnarounds}"),
        ],
        env=environment,
    )
    try:
        yield Stack(psutil.Process(scheduler.pid), psutil.Process(runner.pid), turnarounds, endpoints)
    finally:
        scheduler.terminate()
        time.sleep(0.2)
        scheduler.terminate()  # the second signal ends whatever still runs
        runner.terminate()
        scheduler.wait(20)
        runner.wait(20)


def sampled_tokens(stack: Stack) -> int:
    """Returns the number of tokens sampled so far, as the engine counts them."""
    with grpc.insecure_channel(stack.endpoints.admin_listen) as channel:
        status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True)
    return int(status.totals.sampled_tokens)


def measure(name: str, arguments: argparse.Namespace) -> Load:
    """Runs one load on a new stack."""
    with tempfile.TemporaryDirectory() as folder, running_stack(arguments, Path(folder)) as stack:
        clients = subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.frontend.clients", name, f"--address={stack.endpoints.listen}"),
                *(f"--clients={arguments.clients}", f"--sessions={arguments.sessions}"),
                *(f"--max-tokens={arguments.max_tokens}",),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        client_process = psutil.Process(clients.pid)
        try:
            _ask(clients)  # answers once all requests have started
            time.sleep(WARM_UP_S)
            begin_s, cpu, client_cpu = time.perf_counter(), stack.cpu_s(), _cpu_s(client_process)
            sampled, read = sampled_tokens(stack), _ask(clients)
            stack.turnarounds.write_text("")
            time.sleep(arguments.seconds)
            turnaround_ms = np.array(stack.turnarounds.read_text().split(), float)
            sampled, end = sampled_tokens(stack) - sampled, _ask(clients)
            took_s = time.perf_counter() - begin_s
            cpu = {part: after - cpu[part] for part, after in stack.cpu_s().items()}
            cpu["clients"] = _cpu_s(client_process) - client_cpu
        finally:
            clients.kill()
            clients.wait()
    tokens = end["tokens"] - read["tokens"] if name != "silent" else sampled
    messages = max(1, end["messages"] - read["messages"])
    cpu_us = {part: seconds / max(1, tokens) * 1e6 for part, seconds in cpu.items()}
    return Load(name, tokens / took_s, tokens / messages, cpu_us, turnaround_ms)


def _ask(clients: subprocess.Popen[bytes]) -> dict[str, int]:
    """Returns the clients' counts so far."""
    if clients.stdin is None or clients.stdout is None:
        raise RuntimeError("the clients were started without pipes")
    clients.stdin.write(b"\n")
    clients.stdin.flush()
    counts: dict[str, int] = json.loads(clients.stdout.readline())
    return counts


def report(loads: list[Load]) -> None:
    """Prints a table, and how much the streams delay the engine."""
    print(
        f"{'load':10}{'tokens/s':>10}{'tok/msg':>9}{'service':>9}{'engine':>8}{'workers':>9}{'runner':>8}{'clients':>9}"
    )
    for load in loads:
        parts = "".join(f"{load.cpu_us[part]:>{width}.1f}" for part, width in COLUMNS.items())
        print(f"{load.name:10}{load.tokens_per_s:>10,.0f}{load.tokens_per_message:>9.1f}{load.service_us:>9.1f}{parts}")
    print("CPU columns are µs per token\n")
    silent = next((load for load in loads if load.name == "silent"), None)
    for load in loads:
        for percentile, bar in LATE_MS_BARS.items():
            value = float(np.percentile(load.turnaround_ms, percentile))
            line = f"{load.name:10}engine's turnaround p{percentile} {value:6.2f} ms"
            if silent is not None and load is not silent:
                late = value - float(np.percentile(silent.turnaround_ms, percentile))
                line += f"   added by streams {late:+6.2f} ms (bar {bar})"
            print(line)
    for load in loads:
        if load.name in BARS:
            met = load.service_us <= BARS[load.name] and load.tokens_per_s >= TOKENS_PER_S_BAR
            bars = f"{BARS[load.name]:g} µs per token, {TOKENS_PER_S_BAR:,} tokens/s"
            print(f"{load.name:10}bar {bars}: {'met' if met else 'NOT met'}")


COLUMNS = {"engine": 8, "workers": 9, "runner": 8, "clients": 9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of each load, in seconds")
    parser.add_argument("--step-ms", type=float, default=5.0, help="duration of the null runner's steps, in ms")
    parser.add_argument("--clients", type=int, default=256, help="concurrent requests")
    parser.add_argument(
        "--sessions",
        type=int,
        default=1,
        help="Session streams that share the requests; 1 is one backend that multiplexes all",
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of each request")
    parser.add_argument("--workers", type=int, default=1, help="front worker processes")
    parser.add_argument("--depth", type=int, default=2, help="plans in flight")
    parser.add_argument("--loads", nargs="+", default=["silent", "generate", "session"], help="which loads to run")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    source = provenance("bench.frontend", PACKAGES)
    print(f"{source['command']}\n{source['versions']}; {source['cores']} cores, {source['processor']}\n")
    loads = [measure(name, arguments) for name in arguments.loads]
    report(loads)
    if arguments.json:
        write_results(arguments.json, source, {"loads": [load.record() for load in loads]})


if __name__ == "__main__":
    main()
