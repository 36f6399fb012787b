"""Cases of the comparison (systems and loads), and their requests."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bench.common.traces import CONVERSATIONS
from roster_client.bench.load.prompts import token_prompts
from roster_client.bench.load.workload import Arrivals, Workload, make_workload, repeated
from scheduler_svc.simulator.trace import Trace, TraceRequest, read_trace

POLICIES = ("fcfs", "orca", "static")
TRANSFORMERS = "transformers"
SYSTEMS = (*POLICIES, TRANSFORMERS)
GIANT = "giant"
SEED, SALT = 1, 1
LEAST_REQUESTS = 8
CHAT = (200, 200)
"""Prompt and output tokens of the chats that a giant prompt disturbs; divided like the trace."""
WARM_UP = (256, 16)
"""Prompt and output tokens of the requests before a system's first case; divided like the trace."""


@dataclass(frozen=True, slots=True)
class Case:
    """One system under one load."""

    system: str
    load: str
    """Requests per second of the trace, or `GIANT`."""

    @property
    def title(self) -> str:
        return f"{self.system}, {self.load if self.load == GIANT else f'{self.load}/s'}"


def parse_cases(text: str) -> list[Case]:
    """Parses `SYSTEM=LOAD,LOAD,...`, where a load is a rate or "giant". Raises ValueError for anything else."""
    system, _, loads = text.partition("=")
    if system not in SYSTEMS or not loads:
        raise ValueError(
            f"{text!r} is no list of loads: write {SYSTEMS[0]}=4,10,{GIANT}; the systems are {', '.join(SYSTEMS)}"
        )
    for load in loads.split(","):
        if load != GIANT and not float(load) > 0:
            raise ValueError(f"{load!r} is neither a rate above 0 nor {GIANT!r}")
    return [Case(system, load) for load in loads.split(",")]


def workloads(options: argparse.Namespace, cases: Iterable[Case], vocab_size: int) -> dict[str, Workload]:
    """Returns the workloads by load: every system gets the same requests at the same times."""
    return {load: _workload(options, load, vocab_size) for load in dict.fromkeys(case.load for case in cases)}


def _workload(options: argparse.Namespace, load: str, vocab_size: int) -> Workload:
    if load == GIANT:
        trace, arrivals = _chats_and_giant(options), Arrivals()
    else:
        rows = read_trace(CONVERSATIONS).divided(options.prompt_divisor, options.output_divisor)
        count = max(LEAST_REQUESTS, round(float(load) * options.seconds))
        trace, arrivals = repeated(rows, count), Arrivals(rate=float(load))
    made = make_workload(trace, arrivals, token_prompts(vocab_size, SALT), seed=SEED)
    divisors = {"prompt_divisor": options.prompt_divisor, "output_divisor": options.output_divisor}
    return replace(made, settings={"load": load, **divisors})


def _chats_and_giant(options: argparse.Namespace) -> Trace:
    """Returns evenly spaced chats, and a giant prompt with one output token after half of the time."""
    count = max(LEAST_REQUESTS, round(options.background * options.giant_seconds))
    prompt, output = divided(options, CHAT)
    chats = [TraceRequest(number / options.background, prompt, output) for number in range(count)]
    giant = TraceRequest(chats[count // 2].arrival_s + 0.5 / options.background, options.giant, 1)
    both = sorted([*chats, giant], key=lambda request: request.arrival_s)
    return Trace(f"chats of {prompt} + {output} tokens and one prompt of {options.giant:,}", tuple(both))


def warm_up(options: argparse.Namespace, count: int, vocab_size: int) -> Workload:
    """Returns `count` short requests, all at once."""
    row = TraceRequest(0.0, *divided(options, WARM_UP))
    arrivals = Arrivals(at_once=True)
    return make_workload(Trace("warm-up", (row,) * count), arrivals, token_prompts(vocab_size, SALT + 1))


def divided(options: argparse.Namespace, lengths: tuple[int, int]) -> tuple[int, int]:
    """Returns prompt and output tokens divided like the trace's."""
    prompt, output = lengths
    return max(1, prompt // options.prompt_divisor), max(2, output // options.output_divisor)


def named(workload: Workload, prefix: str) -> Workload:
    """Returns the workload with new ids, because a server treats a known id as a reconnecting client."""
    requests = (replace(request, request_id=f"{prefix}-{request.request_id}") for request in workload.requests)
    return replace(workload, requests=tuple(requests))
