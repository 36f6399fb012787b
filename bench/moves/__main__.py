"""Drains one of two runners: `python -m bench.moves --shape llama-3.1-8b --sequences 16 --prompt 4096`.

Both runners are processes of this machine, on one GPU with half of its memory each, where they take turns of some 2 ms:
pauses are measured, step times are not. With `--gpus 2` each has its own, and KV moves from one to the other. The
sequences decode on one runner; it receives SIGTERM; they go on at the
other one. `pause` is a stream's longest gap between tokens from then on, beside its usual gap. No position may be
computed again: the prefill tokens of both runners are those of the prompts, and one for each sequence that moved.
`--again` computes the same answers a second time, on the second runner alone, and counts those that are equal, and the
equal leading tokens of the others: these differ where logits nearly tie, wherever that is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.errors import UnavailableError
from roster_client.client.events import Delta
from roster_client.serve.child_process import ChildProcess
from roster_client.serve.stack import Endpoints
from roster_common.setting_options import as_arguments
from runner_svc.group.member import own_gpu_first

READY_S = 90.0
WORDS = ("move", "lost", "leaves")
"""Of lines of the processes' logs that are kept."""


def runner_settings(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Returns the settings that both runners share."""
    settings: dict[str, object] = {
        "device": arguments.device,
        "slots": 2 * arguments.sequences,
        "kv_tokens": 2 * arguments.sequences * (arguments.prompt + arguments.tokens),
        "move_listen": "127.0.0.1:0",
        "log_level": "info",
    }
    if arguments.device == "cuda":
        write_folder(arguments.shape, folder / arguments.shape)
        memory = 0.45 if arguments.gpus == 1 else 0.9
        settings |= {"model": folder / arguments.shape, "weights": "random", "gpu_memory": memory}
    else:
        settings["test_backend"] = {"step_ms": 5, "eos_probability": 0}
    return settings


class Fleet:
    """A scheduler and runners "a", "b", ... as child processes."""

    def __init__(self, settings: dict[str, object], *, gpus: int = 1, decoding: str = "b") -> None:
        """`gpus`: among how many the runners are divided, by name. `decoding`: names of those that take no prompts."""
        self.endpoints = Endpoints.free()
        self._settings = settings
        self._gpus, self._decoding = gpus, decoding
        self._children: dict[str, ChildProcess] = {}
        self.lines: list[str] = []

    async def start(self, name: str) -> None:
        """Starts the scheduler, or a runner of this name."""
        ends = self.endpoints
        if name == "scheduler":
            flags = [f"--listen={ends.listen}", f"--link={ends.link}", f"--admin-listen={ends.admin_listen}"]
            command = [
                sys.executable,
                "-m",
                "scheduler_svc.main",
                *flags,
                "--metrics-listen=",
                "--flush-ms=1",
                "--log-level=debug",
            ]
        else:
            role = {"role": "decode"} if name in self._decoding else {}  # so that all prompts go to the first one
            flags = as_arguments({"link": ends.link, "runner_id": name, **self._settings, **role})
            seen = [] if self._gpus == 1 else ["env", f"CUDA_VISIBLE_DEVICES={self._visible(name)}"]
            command = [*seen, sys.executable, "-m", "runner_svc.main", *flags]
        self._children[name] = await ChildProcess.start(name, command, self._line)

    def _visible(self, name: str) -> str:
        return own_gpu_first(ord(name) - ord("a"), self._gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))

    async def ready(self, admin: AdminClient, count: int) -> None:
        """Waits until `count` runners serve. Raises RuntimeError."""
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if len((await admin.get_status(deadline_s=2)).runners) >= count:
                    return
            except UnavailableError:
                pass
            ended = [child for child in self._children.values() if child.returncode is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {[' | '.join(child.tail) for child in ended] or self.lines[-20:]}")
            await asyncio.sleep(0.05)

    async def end(self, name: str) -> float:
        """Sends SIGTERM and waits for the end; returns the seconds that it took."""
        began_at = time.monotonic()
        await self._children.pop(name).stop(60.0)
        return time.monotonic() - began_at

    async def stop(self) -> None:
        """Ends all."""
        for name in list(self._children):
            await self.end(name)

    def _line(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")


async def stream(client: RosterClient, prompt: list[int], num_tokens: int, arrivals: list[float]) -> list[int]:
    """Generates greedily; appends the time of each token to `arrivals`. Returns the tokens."""
    tokens: list[int] = []
    async with client.generate(prompt, max_tokens=num_tokens, ignore_eos=True, temperature=0.0) as generation:
        async for event in generation:
            if isinstance(event, Delta):
                tokens += event.token_ids
                arrivals += [time.monotonic()] * len(event.token_ids)
    return tokens


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the drain once and returns the figures."""
    fleet = Fleet(runner_settings(arguments, folder), gpus=arguments.gpus)
    rng = np.random.default_rng(0)
    vocabulary = ALL_SHAPES[arguments.shape]["vocab_size"] if arguments.device == "cuda" else 256
    prompts = [rng.integers(0, vocabulary, arguments.prompt).tolist() for _ in range(arguments.sequences)]
    try:
        for name in ("scheduler", "a", "b"):
            await fleet.start(name)
        ends = fleet.endpoints
        async with RosterClient(ends.listen) as client, AdminClient(ends.admin_listen) as admin:
            await fleet.ready(admin, 2)
            arrivals: list[list[float]] = [[] for _ in prompts]
            streams = [
                asyncio.create_task(stream(client, prompt, arguments.tokens, times))
                for prompt, times in zip(prompts, arrivals, strict=True)
            ]
            while not all(len(times) >= 32 for times in arrivals):
                await asyncio.sleep(0.01)
            held = {entry.id: entry.running for entry in (await admin.get_status(deadline_s=10)).runners}
            drained_at = time.monotonic()
            drain_s = await fleet.end("a")
            left = [len(times) for times in arrivals]
            answers = await asyncio.gather(*streams)
            status = await admin.get_status(deadline_s=10)
            again = await asyncio.gather(
                *(stream(client, prompt, arguments.tokens, []) for prompt in prompts if arguments.again)
            )
        if any(len(tokens) != arguments.tokens for tokens in answers):
            raise RuntimeError("a stream ended early")
        found = figures(arrivals, drained_at, drain_s, held, left, fleet, status)
        return found | {"equal": [num_equal(*pair) for pair in zip(answers, again, strict=False)]}
    finally:
        await fleet.stop()


def num_equal(first: list[int], second: list[int]) -> int:
    """Returns the number of equal leading tokens."""
    return next((index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


def figures(
    arrivals: list[list[float]],
    drained_at: float,
    drain_s: float,
    held: dict[str, int],
    left: list[int],
    fleet: Fleet,
    status: Any,
) -> dict[str, Any]:
    """Returns what is reported."""
    pauses, usual = [], []
    for times in arrivals:
        gaps = np.diff(times)
        after = np.array(times[1:]) > drained_at
        window = after & (np.array(times[1:]) < drained_at + drain_s + 1.0)
        pauses.append(float(gaps[window].max(initial=0.0)) * 1e3)
        usual.append(float(np.median(gaps[~after])) * 1e3)
    return {
        "held": held,
        "drain_s": drain_s,
        "tokens_at_the_end": left,
        "pause_ms": {"worst": max(pauses), "median": statistics.median(pauses)},
        "usual_gap_ms": statistics.median(usual),
        "moves": str(status.moves).split("\n"),
        "prefill_tokens": status.totals.prefill_tokens,
        "lines": [
            line for line in fleet.lines if "move" in line or "unmapped" in line or "lost" in line or "leaves" in line
        ],
    }


def main() -> None:
    """Prints the figures, and writes them to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "hash"), default="cuda")
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each answer")
    parser.add_argument("--again", action="store_true", help="compare the answers with a second computation")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    source = provenance("bench.moves", ["torch", "pyzmq", *(["cupy-cuda13x"] if arguments.device == "cuda" else [])])
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(arguments, Path(folder)))
    for name, value in found.items():
        print(f"{name}: {value}")
    if arguments.json is not None:
        write_results(arguments.json, source, {"shape": arguments.shape, **found})


if __name__ == "__main__":
    main()
