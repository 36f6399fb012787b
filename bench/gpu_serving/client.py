"""Open-loop clients of `bench.gpu_serving`, in a separate process: requests are sent when due, whatever the answers do.

A few Session streams share the requests. The record goes to an .npz file (`ClientRecord`); while requests run, the
process only takes a time stamp and appends to a list per row. It also measures its own delays: of sending requests, and
of its event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import grpc
import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.common.traces import TRACES, trace_lengths
from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc

START_DELAY_S = 0.5
"""Seconds from the start of the event loop to the first request."""
TICK_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class ClientRecord:
    """The clients' record of N requests and their D deltas. Times in nanoseconds of the machine's monotonic clock."""

    due: NDArray[np.int64]  # [N]
    sent: NDArray[np.int64]  # [N]
    prompt_tokens: NDArray[np.int64]  # [N]
    delta_requests: NDArray[np.int64]  # [D] index of each delta's request, in order of arrival
    delta_times: NDArray[np.int64]  # [D]
    delta_tokens: NDArray[np.int64]  # [D]
    loop_lag: NDArray[np.int64]  # delay of the event loop, sampled every TICK_S

    def save(self, path: Path) -> None:
        """Writes an .npz file."""
        np.savez(path, **asdict(self))

    @classmethod
    def load(cls, path: Path) -> ClientRecord:
        """Reads a file that `save` wrote."""
        with np.load(path) as arrays:
            return cls(**arrays)


class Clients:
    """All sessions and their record."""

    def __init__(
        self, address: str, lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int, *, speculate: bool = True
    ) -> None:
        """`lengths` are the (prompt, output) tokens of each request. Prompts are random ordinary ids."""
        rng = np.random.default_rng(seed)
        self._address = address
        self._lengths = lengths
        self._requests = [
            _request(rng.integers(256, vocab_size, prompt), output, speculate) for prompt, output in lengths
        ]
        self._due = [0] * len(lengths)
        self._sent = [0] * len(lengths)
        self._deltas: list[tuple[int, int, int]] = []
        self._left = [output for _, output in lengths]
        self._loop_lag: list[int] = []

    async def run(self, arrivals_s: Sequence[float], num_sessions: int) -> ClientRecord:
        """Sends each request at its time; returns when all have ended. Raises RuntimeError if one was cut short."""
        ticker = asyncio.create_task(self._tick())
        start = time.monotonic_ns() + int(START_DELAY_S * 1e9)
        self._due = [start + int(arrival * 1e9) for arrival in arrivals_s]
        sessions = [self._session(range(first, len(arrivals_s), num_sessions)) for first in range(num_sessions)]
        await asyncio.gather(*sessions)
        ticker.cancel()
        missing = sum(left != 0 for left in self._left)
        if missing:
            raise RuntimeError(f"{missing} requests got fewer tokens than they asked for")
        return self.record()

    def record(self) -> ClientRecord:
        """Returns what has arrived so far."""
        requests, times, tokens = np.array(self._deltas, np.int64).reshape(-1, 3).T
        prompts = np.array([prompt for prompt, _ in self._lengths], np.int64)
        due, sent, lag = (np.array(column, np.int64) for column in (self._due, self._sent, self._loop_lag))
        return ClientRecord(due, sent, prompts, requests, times, tokens, lag)

    async def _session(self, numbers: Sequence[int]) -> None:
        """Runs one Session that sends the requests with these numbers."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Session(wait_for_ready=True)
            writer = asyncio.create_task(self._write(call, numbers))
            async for response in call:
                self._take(response)
            await writer

    async def _write(self, call: grpc.aio.StreamStreamCall, numbers: Sequence[int]) -> None:
        for number in numbers:
            await asyncio.sleep((self._due[number] - time.monotonic_ns()) / 1e9)
            self._sent[number] = time.monotonic_ns()
            await call.write(pb.SessionRequest(tag=number, generate=self._requests[number]))
        await call.done_writing()

    def _take(self, response: pb.SessionResponse) -> None:
        now = time.monotonic_ns()
        tags = response.tags
        for tag, count in zip(tags, response.token_counts or [1] * len(tags), strict=True):
            self._deltas.append((tag, now, count))
            self._left[tag] -= count
        for event in response.events:
            if event.HasField("refused"):
                raise RuntimeError(f"request {event.tag} was refused: {event.refused.message}")

    async def _tick(self) -> None:
        while True:
            begin = time.monotonic_ns()
            await asyncio.sleep(TICK_S)
            self._loop_lag.append(time.monotonic_ns() - begin - int(TICK_S * 1e9))


def _request(prompt: NDArray[np.int64], output: int, speculate: bool) -> pb.GenerateRequest:
    """Returns a greedy request for exactly `output` tokens."""
    request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt.tolist())))
    request.sampling.temperature = 0.0
    request.stop.max_tokens = output
    request.stop.ignore_eos = True
    if not speculate:
        request.speculate = False
    return request


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Returns seconds from the start: a Poisson process of `rate` requests per second; all at once if `rate` is 0."""
    if rate == 0:
        return [0.0] * count
    rng = random.Random(seed)
    return [0.0, *accumulate(rng.expovariate(rate) for _ in range(count - 1))]


def phase_times(rates: Sequence[float], phase_s: float, seed: int) -> list[float]:
    """Returns seconds from the start: a Poisson process whose rate is each of `rates` for `phase_s` seconds.

    A phase has as many arrivals as are expected, so that loads with different seeds are alike.
    """
    rng = random.Random(seed)
    return [
        (phase + place) * phase_s
        for phase, rate in enumerate(rates)
        for place in sorted(rng.random() for _ in range(round(rate * phase_s)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument(
        "--trace", default="", help="file in bench/traces; without it, --prompt and --output give the lengths"
    )
    parser.add_argument("--rows", type=int, default=512, help="rows of the trace, used repeatedly")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of every prompt; with a trace, the maximum")
    parser.add_argument("--output", type=int, default=512, help="output tokens of every request")
    parser.add_argument("--requests", type=int, help="required without --rates")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: all at once")
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second of each phase")
    parser.add_argument("--phase-s", type=float, default=2.0, help="seconds of a phase")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-speculate", dest="speculate", action="store_false")
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    lengths = [(arguments.prompt, arguments.output)]
    if arguments.trace:
        lengths = trace_lengths(TRACES / arguments.trace, arguments.rows, arguments.prompt)
    if arguments.rates:
        arrivals = phase_times(arguments.rates, arguments.phase_s, arguments.seed)
    elif arguments.requests is not None:
        arrivals = arrival_times(arguments.requests, arguments.rate, arguments.seed)
    else:
        parser.error("--requests or --rates is required")
    repeated = [lengths[number % len(lengths)] for number in range(len(arrivals))]
    clients = Clients(arguments.address, repeated, arguments.vocab_size, arguments.seed, speculate=arguments.speculate)
    uvloop.run(clients.run(arrivals, arguments.sessions)).save(arguments.record)


if __name__ == "__main__":
    main()
