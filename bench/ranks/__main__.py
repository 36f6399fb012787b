"""Time until all ranks have a plan: `python -m bench.ranks --ranks 4 --plans 3000`.

A process that stands for the scheduler sends plans over ZeroMQ and loopback, as the link does by default, each with the
time. Rank 0 receives it (`hop`), parses it and passes it on as a runner does, and each other rank takes it from the
ring. `spread` is the time from the arrival at rank 0 until the last rank has the plan's bytes. Plans come one at a
time, after a pause of random length, for which ranks sleep, or poll if there are cores for that. `broadcast` is the
same through a second ZeroMQ socket in place of the ring, in turns with it. With `--nodes 2` each half of the ranks has
a ring of its own, and two processes that stand for launchers pass plans from one to the other over loopback.

`--check` exits with status 1 unless the spread's median is at most 1.5 hops, or 100 us with 8 cores or more. On a
machine with other load `--realtime` measures as if there was none.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from bench.common.provenance import provenance, write_results
from roster_client.serve.free_ports import free_ports
from roster_client.serve.stack import Endpoints
from roster_protos import plan_pb2
from runner_svc.group.member import Member
from runner_svc.group.node import Node
from runner_svc.group.records import Kind, Record
from runner_svc.group.shared_page import attach, create
from runner_svc.interface.ranks import Shard
from runner_svc.nodes.node_link import LinkOptions
from runner_svc.nodes.opening import link_of

MOST_HOPS, MOST_US, MANY_CORES = 1.5, 100.0, 8
WARM_UP = 200
PRIORITY = 10
PATIENCE_MS = 20_000


def a_plan(number: int, rows: int) -> plan_pb2.Plan:
    """Returns a plan in which `rows` sequences decode one token each."""
    return plan_pb2.Plan(
        extent_slots=np.arange(rows, dtype="<i4").tobytes(),
        extent_starts=np.full(rows, 1000 + number, "<i4").tobytes(),
        extent_counts=np.ones(rows, "<i4").tobytes(),
        extent_flags=np.ones(rows, np.uint8).tobytes(),
    )


class Times:
    """When each rank held each plan, in memory that all processes share: int64 [ranks, plans] of nanoseconds."""

    def __init__(self, descriptor: int, ranks: int, plans: int) -> None:
        os.ftruncate(descriptor, ranks * plans * 8)
        memory = mmap.mmap(descriptor, ranks * plans * 8)
        self.held: NDArray[np.int64] = np.frombuffer(memory, np.int64).reshape(ranks, plans)

    def wait(self, plan: int) -> None:
        """Returns once every rank but 0 holds the plan. Raises TimeoutError."""
        until_at = time.monotonic() + PATIENCE_MS / 1000
        while not self.held[1:, plan].all():
            if time.monotonic() > until_at:
                raise TimeoutError(f"a rank has not received plan {plan}")
            time.sleep(0.0005)


def member_of(rank: int, arguments: argparse.Namespace) -> Member:
    """Returns a rank's place on its node."""
    size, nodes = arguments.ranks, arguments.nodes
    node = Node(size, rank * nodes // size, nodes)
    return Member(Shard(rank, size), arguments.pages[node.number], node=node)


def launch(number: int, arguments: argparse.Namespace) -> None:
    """What stands for a node's launcher does: it passes on what the ranks need of other nodes."""
    node = Node(arguments.ranks, number, arguments.nodes)
    options = LinkOptions(f"tcp://127.0.0.1:{arguments.port}", {}, PATIENCE_MS / 1000)
    link_of(attach(arguments.pages[number]), node, options, None).start()
    while True:
        time.sleep(1)  # it is killed in the end


def follow(rank: int, arguments: argparse.Namespace) -> None:
    """What ranks other than 0 do: they take each plan from the ring, or from the other socket."""
    times = Times(arguments.times, arguments.ranks, arguments.plans)
    member = member_of(rank, arguments)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"ipc://{arguments.folder}/broadcast")
    member.gather()
    for plan in range(arguments.plans):
        packed = socket.recv() if through_socket(plan) else member.ring.read()
        times.held[rank, plan] = time.monotonic_ns()
        plan_pb2.Plan.FromString(Record.read(packed).body)


def send(arguments: argparse.Namespace) -> None:
    """What stands for the scheduler does: it sends a plan whenever rank 0 is ready for one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(arguments.link)
    rng = random.Random(1)
    for plan in range(arguments.plans):
        identity, _ = socket.recv_multipart()
        time.sleep(rng.uniform(0.0005, 0.004))
        message = plan_pb2.ToRunner(session=1, number=plan + 1, plan=a_plan(plan, arguments.rows))
        frame = message.SerializeToString()
        socket.send_multipart([identity, time.monotonic_ns().to_bytes(8, "little"), frame])
    socket.recv_multipart()  # rank 0 has the last one


JOBS = {"follow": follow, "launch": launch}


def through_socket(plan: int) -> bool:
    """Whether the plan goes through the other socket: every other one does."""
    return bool(plan % 2)


def lead(arguments: argparse.Namespace, times: Times, folder: str) -> NDArray[np.int64]:
    """What rank 0 does; returns when each plan was sent and when it arrived, [2, plans]."""
    member = member_of(0, arguments)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link, others = context.socket(zmq.DEALER), context.socket(zmq.PUB)
    link.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    link.connect(arguments.link)
    others.bind(f"ipc://{folder}/broadcast")
    member.gather()
    time.sleep(0.5)  # until all have subscribed
    at = np.zeros((2, arguments.plans), np.int64)
    for plan in range(arguments.plans):
        link.send(b"")
        sent, frame = link.recv_multipart()
        at[:, plan] = int.from_bytes(sent, "little"), time.monotonic_ns()
        message = plan_pb2.ToRunner.FromString(frame)
        packed = Record(Kind.LAUNCH, message.number, message.plan.SerializeToString()).packed()
        others.send(packed) if through_socket(plan) else member.ring.write(packed)
        times.held[0, plan] = time.monotonic_ns()
        times.wait(plan)
    link.send(b"")
    context.destroy(linger=1000)
    return at


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Runs all processes and returns the figures, in microseconds."""
    arguments.pages, arguments.times = [create() for _ in range(arguments.nodes)], os.memfd_create("times")
    arguments.link, (arguments.port,) = Endpoints.free().link, free_ports(1)
    times = Times(arguments.times, arguments.ranks, arguments.plans)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [("send", 0), *(("follow", rank) for rank in range(1, arguments.ranks))]
        jobs += [("launch", node) for node in range(arguments.nodes) if arguments.nodes > 1]
        names = ("ranks", "nodes", "plans", "rows", "times", "link", "port")
        flags = [f"--{name}={getattr(arguments, name)}" for name in names]
        flags += ["--pages", *map(str, arguments.pages)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.ranks", *flags, f"--folder={folder}", f"--job={job}", f"--rank={rank}"],
                pass_fds=(*arguments.pages, arguments.times),
            )
            for job, rank in jobs
        ]
        try:
            at = lead(arguments, times, folder)
        finally:
            for child in children:
                child.kill()
                child.wait()
    hop, spread = at[1] - at[0], times.held.max(0) - at[1]
    ring, socket = np.arange(WARM_UP, arguments.plans, 2), np.arange(WARM_UP + 1, arguments.plans, 2)
    bytes_of_plan = a_plan(0, arguments.rows).ByteSize()
    return {
        "ranks": arguments.ranks,
        "nodes": arguments.nodes,
        "rows": arguments.rows,
        "plan_bytes": bytes_of_plan,
        "hop_us": percentiles(hop[WARM_UP:]),
        "spread_us": percentiles(spread[ring]),
        "broadcast_us": percentiles(spread[socket]),
    }


def percentiles(times_ns: NDArray[np.int64]) -> dict[str, float]:
    """Returns percentiles in microseconds."""
    return {f"p{q}": round(float(np.percentile(times_ns, q)) / 1000, 1) for q in (50, 90, 99)}


def complaint(figures: dict[str, object], cores: int) -> str:
    """Returns what the figures miss; '' if nothing."""
    spread, hop = (figures[name]["p50"] for name in ("spread_us", "hop_us"))  # type: ignore[index]
    limit = MOST_US if cores >= MANY_CORES else MOST_HOPS * hop
    return f"the ranks hold a plan after {spread} us, not {limit:.1f} us" if spread > limit else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1, help="hosts among which the ranks are divided")
    parser.add_argument("--plans", type=int, default=3000)
    parser.add_argument("--rows", type=int, default=64, help="sequences that decode")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--realtime", action="store_true", help="keep other programs off the cores; needs CAP_SYS_NICE")
    parser.add_argument("--output", type=Path, help="file for the figures")
    parser.add_argument("--pages", type=int, nargs="+", help=argparse.SUPPRESS)
    for name, kind in (("job", str), ("rank", int), ("times", int), ("folder", str), ("link", str), ("port", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        send(arguments) if arguments.job == "send" else JOBS[arguments.job](arguments.rank, arguments)
        return
    if arguments.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))  # the other processes inherit it
    figures = measure(arguments)
    for name, value in figures.items():
        print(f"{name:14} {value}")
    if arguments.output:
        write_results(arguments.output, provenance("bench.ranks", ("pyzmq", "protobuf", "numpy")), figures)
    if arguments.check and (missed := complaint(figures, len(os.sched_getaffinity(0)))):
        sys.exit(missed)


if __name__ == "__main__":
    main()
