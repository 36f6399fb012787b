"""Kills ranks of a group under load: how long streams pause, and whether a token is lost.

    python -m bench.tensor_parallel.killed --ranks 2 --shape llama-3.1-8b --kills 3

Serves the model with `roster-runner --tensor-parallel`, sends requests at a rate, and kills a rank every few seconds
with SIGKILL: the last one, the one before it, and so on, then the last one again. A pause is the longest time around a
kill in which no stream got a token. Every request must get as many tokens as it asked for. The survivors' processes
must stay: they load nothing. `--device hash` tries the command on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.gpu_serving.client import ClientRecord, Clients
from bench.gpu_serving.service import card_of
from bench.tensor_parallel.exchanges import NCCL, ONE_SHOT
from roster_client.serve.stack import RUNNER, Endpoints, Stack

PROMPT = 512
READY_S = 300.0
_AGAIN_S = 120.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"\b(\w+)=(\d+)")


def pause_at(record: ClientRecord, killed_at_ns: int) -> float:
    """Returns the seconds in which no stream got a token, around or after a kill."""
    times = np.sort(record.delta_times)
    place = int(np.searchsorted(times, killed_at_ns))
    window = times[max(0, place - 1) : place + 400]
    return float(np.diff(window).max()) / 1e9 if len(window) > 1 else float("nan")


class RunnerLines:
    """Prints the services' lines, counts how often the group has formed, and knows the ranks' processes."""

    def __init__(self) -> None:
        self.formed = 0
        self.pids: dict[int, int] = {}
        """Process of each rank."""

    def __call__(self, name: str, line: str) -> None:
        if name == RUNNER:
            self.formed += " ready " in line
            fields = dict(_NUMBER.findall(_COLOURS.sub("", line)))
            if " started a rank " in line:
                self.pids[int(fields["rank"])] = int(fields["pid"])
        print(f"{name:>9} | {line[:200]}", flush=True)


async def killed_one(rank: int, lines: RunnerLines) -> dict[str, Any]:
    """Kills a rank and waits until the group has formed again; returns what happened."""
    before, formed = dict(lines.pids), lines.formed
    at_ns = time.monotonic_ns()
    os.kill(before[rank], signal.SIGKILL)
    until_s = time.monotonic() + _AGAIN_S
    while time.monotonic() < until_s:
        await asyncio.sleep(0.05)
        if lines.formed > formed:
            stay = all(lines.pids[each] == before[each] for each in before if each != rank)
            return {"rank": rank, "at_ns": at_ns, "survivors_stayed": stay}
    raise RuntimeError(f"the group did not form again within {_AGAIN_S:.0f} s")


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serves, loads and kills; returns the numbers."""
    runner: dict[str, object] = {"device": "hash", "model": "hash"}
    if arguments.device == "cuda":
        write_folder(arguments.shape, folder)
        if arguments.layers:
            config = {**ALL_SHAPES[arguments.shape], "num_hidden_layers": arguments.layers}
            (folder / "config.json").write_text(json.dumps(config))
        runner = {"device": "cuda", "model": folder, "weights": "random", "all_reduce": arguments.all_reduce}
    runner |= {"tensor_parallel": arguments.ranks, "fork_ranks": arguments.fork_ranks}
    if arguments.kv_tokens:
        runner["kv_tokens"] = arguments.kv_tokens
    count, lines = round(arguments.rate * arguments.seconds), RunnerLines()
    began_at = time.monotonic()
    async with Stack(Endpoints.free(), scheduler={}, runner=runner, on_line=lines) as stack:
        model = await stack.wait_ready(READY_S)
        print(f"ready in {time.monotonic() - began_at:.1f} s", flush=True)
        lengths = [(PROMPT, arguments.tokens)] * count
        clients = Clients(stack.endpoints.listen, lengths, model.vocab_size, arguments.seed)
        load = asyncio.create_task(clients.run([index / arguments.rate for index in range(count)], 4))
        kills = []
        for number in range(1, arguments.kills + 1):
            await asyncio.sleep(arguments.every)
            kill = await killed_one(-number % arguments.ranks, lines)
            kills.append({**kill, "under_load": not load.done()})
            print(f"rank {kill['rank']} was killed, and the group has formed again", flush=True)
        record = await load  # raises an exception if a request got fewer tokens
    return {
        "ranks": arguments.ranks,
        "all_reduce": arguments.all_reduce,
        "fork_ranks": arguments.fork_ranks,
        "requests": count,
        "tokens": int(record.delta_tokens.sum()),
        "lost": count * arguments.tokens - int(record.delta_tokens.sum()),
        "kills": [{**kill, "pause_s": pause_at(record, kill.pop("at_ns"))} for kill in kills],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="of the shape, to try the command")
    parser.add_argument("--all-reduce", choices=(ONE_SHOT, NCCL), default=NCCL)
    parser.add_argument("--device", choices=("cuda", "hash"), default="cuda", help="hash: to try the command on a CPU")
    parser.add_argument("--fork-ranks", choices=("on", "off"), default="on", help="as of roster-runner")
    parser.add_argument("--kv-tokens", type=int, help="of each rank's pool (default: all that fit)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (default: 4)")
    parser.add_argument("--seconds", type=float, default=90.0, help="of arrivals (default: 90)")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer (default: 256)")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="seconds of peace before a kill (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        numbers = asyncio.run(run(arguments, Path(folder)))
    for kill in numbers["kills"]:
        stayed = "stayed" if kill["survivors_stayed"] else "DID NOT STAY"
        late = "" if kill["under_load"] else "; THE LOAD HAD ENDED: raise --seconds"
        print(f"rank {kill['rank']} killed: streams paused {kill['pause_s']:.2f} s, the others {stayed}{late}")
    print(f"{numbers['requests']} requests, {numbers['tokens']} tokens, {numbers['lost']} lost")
    if arguments.output:
        card = card_of(arguments.device)
        write_results(
            arguments.output, provenance("bench.tensor_parallel.killed", ["torch", "cupy", "numpy"], card), numbers
        )


if __name__ == "__main__":
    main()
