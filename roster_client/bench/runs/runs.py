"""The runs of one `roster bench` command: a single run, or several in turn at different rates."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import uvloop
from rich.console import Console

from roster_client.bench.load.workload import Arrivals, LoadRequest, make_workload, repeated
from roster_client.bench.records.record import Run
from roster_client.bench.runs.connection import Connected, connect
from roster_client.bench.runs.from_options import connection_from, settings_from, trace_from
from roster_client.bench.runs.measurement import measure
from roster_client.bench.runs.options import RunOptions
from roster_client.bench.runs.provenance import command_line
from roster_client.bench.runs.sweep import sweep_rates, sweep_to_saturation
from scheduler_svc.simulator.trace import Trace, TraceRequest

WARMUP_PROMPT, WARMUP_OUTPUT = 64, 16
LEAST_REQUESTS = 32
"""Least requests of a sweep's run, even at a low rate."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Common data of a command's runs."""

    options: RunOptions
    rows: Trace
    salt: int
    """Salt of the first run's prompts; each run has its own."""

    @classmethod
    def from_options(cls, options: RunOptions) -> Runs:
        """Reads the requests. Raises ValueError if the options do not specify them."""
        salt = secrets.randbits(40) if options.prompt_salt is None else options.prompt_salt
        return cls(options, trace_from(options), salt)

    def one(self, arrivals: Arrivals) -> list[Run]:
        """Makes one run of `options.requests` requests. Raises RosterError or ValueError if the system is missing."""
        connection = connection_from(self.options)

        async def run() -> list[Run]:
            connected = await connect(connection)
            async with connected.system.target:
                return [await self._measured(connected, arrivals, self.options.requests, 0)]

        return uvloop.run(run())

    def sweep(self, rates: list[float], first_rate: float, seconds: float) -> list[Run]:
        """Makes a run of `seconds` at each of `rates` or, if it is empty, from `first_rate` up to saturation."""
        connection = connection_from(self.options)
        done: list[Run] = []

        async def run() -> list[Run]:
            connected = await connect(connection)

            async def measure_at(rate: float) -> Run:
                count = max(LEAST_REQUESTS, round(rate * seconds))
                done.append(await self._measured(connected, Arrivals(rate=rate), count, len(done)))
                return done[-1]

            async with connected.system.target:
                if rates:
                    return await sweep_rates(measure_at, rates)
                return await sweep_to_saturation(measure_at, first_rate)

        return uvloop.run(run())

    async def _measured(self, connected: Connected, arrivals: Arrivals, count: int, number: int) -> Run:
        """Makes run `number` of the command, from 0; its warm-up's salt is between its own and the next run's."""
        salt = self.salt + 2 * number
        workload = make_workload(
            repeated(self.rows, count),
            arrivals,
            connected.prompts(salt),
            seed=self.options.seed,
            id_prefix=f"{salt:x}-",
        )
        return await measure(
            connected.system,
            replace(workload, settings=settings_from(self.options) | {"prompt_salt": self.salt}),
            command=command_line(),
            seed=self.options.seed,
            warmup=_warmup(connected, self.options.warmup, salt + 1),
            timeout_s=self.options.timeout,
            console=Console(stderr=True),
        )


def _warmup(connected: Connected, count: int, salt: int) -> list[LoadRequest]:
    if not count:
        return []
    rows = Trace("warm-up", (TraceRequest(0.0, WARMUP_PROMPT, WARMUP_OUTPUT),) * count)
    prompts = connected.prompts(salt)
    return list(make_workload(rows, Arrivals(at_once=True), prompts, id_prefix=f"{salt:x}-warm-").requests)
