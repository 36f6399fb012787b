"""Failures under a load: every process is killed or drained, a runner becomes faulty, the policy is swapped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from roster_client.client.admin import AdminClient
from roster_client.client.errors import RosterError
from tests.support.chaos import Load
from tests.support.chaos_requests import EVERYWHERE
from tests.support.processes import RosterProcesses
from tests.support.thoroughness import choice

EARLY = 0.2
"""Fraction of restarts after which the next failure may hit the process while it still starts."""
POLICIES = ("auto", "fcfs", "orca", "fair", "sjf", "priority", "deadline")
ILLNESSES = choice(["error", "kill", "broken"], in_ci=["error"])
"""What a faulty runner does with every plan; the kinds that end the process cost a start each time."""


class Havoc:
    """One kind of failure per method, repeated until `reign` ends; then all processes run and are healthy.

    Each occurs about once in `every` requests of the load, so that their number does not depend on the machine's speed.
    Usually a process serves again before it is ended next; sometimes it is killed while it starts. A process has one
    failure at a time.
    """

    def __init__(
        self, roster: RosterProcesses, load: Load, seed: int, runners: Sequence[str], roles: Sequence[str] = ()
    ) -> None:
        """`roles`: one of them is drawn for each runner that is restarted; none: they keep theirs."""
        self._roster = roster
        self._roles = roles
        self._load = load
        self._outcome = load.outcome
        self._rng = random.Random(seed)
        self._locks = {name: asyncio.Lock() for name in ("scheduler", *runners)}
        self._runners = runners
        self._over = asyncio.Event()

    @asynccontextmanager
    async def reign(self, *troubles: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Causes these failures inside the block.

        Each method finishes what it has begun; the first exception is raised here.
        """
        tasks = [asyncio.create_task(trouble) for trouble in troubles]
        try:
            yield
        finally:
            self._over.set()
            await asyncio.gather(*tasks)

    async def kills(self, every: int) -> None:
        """Kills and restarts a runner."""
        while await self._reached(every):
            await self._end_runner(signal.SIGKILL)

    async def leaves(self, every: int) -> None:
        """Drains and restarts a runner."""
        while await self._reached(every):
            await self._end_runner(signal.SIGTERM)

    async def illness(self, every: int, for_s: float) -> None:
        """Makes a runner fail every plan for `for_s` seconds, then replaces it by a healthy one."""
        while await self._reached(every):
            name = self._free_runner()
            async with self._locks[name]:
                effect = self._rng.choice(ILLNESSES)
                self._outcome.troubles[f"runner ill ({effect})"] += 1
                self._roster.change(name, test_backend={"poison_token": EVERYWHERE, "poison": effect})
                await self._restart(name, signal.SIGKILL)
                await self._is_here([name])
                until_s = time.monotonic() + for_s
                while time.monotonic() < until_s and await self._pause(0.1):
                    if self._roster.has_ended(name):
                        self._roster.start_one(name)
                self._roster.change(name, test_backend={"poison_token": None})
                await self._restart(name, signal.SIGKILL)

    async def scheduler(self, every: int) -> None:
        """Alternately kills and drains the scheduler, and restarts it."""
        kill = self._rng.random() < 0.5
        while await self._reached(every):
            async with self._locks["scheduler"]:
                kill = not kill
                # Counted first: its streams are notified of a drain before the scheduler has ended.
                self._outcome.troubles["scheduler killed" if kill else "scheduler drained"] += 1
                if kill:
                    self._outcome.kills.append((time.monotonic(), "scheduler"))
                await self._restart("scheduler", signal.SIGKILL if kill else signal.SIGTERM)
                await self._mostly_here(self._runners)

    async def workers(self, every: int) -> None:
        """Kills a front worker; the scheduler starts another."""
        while await self._reached(every):
            await self._kill_one("front worker killed", lambda: self._roster.children("scheduler"))

    async def mask_processes(self, every: int) -> None:
        """Kills a mask process; the scheduler starts another."""
        while await self._reached(every):
            await self._kill_one("mask process killed", self._roster.mask_processes)

    async def policies(self, every: int) -> None:
        """Changes the policy."""
        async with AdminClient(self._roster.admin_address) as admin:
            while await self._reached(every):
                with contextlib.suppress(RosterError):  # raised while the scheduler starts
                    await admin.set_policy(self._rng.choice(POLICIES), deadline_s=2)
                    self._outcome.troubles["policy swapped"] += 1

    # ------------------------------------------------------------------ helpers

    async def _reached(self, every: int) -> bool:
        """Waits until about `every` more requests have been started; returns whether the reign goes on."""
        until = self._load.taken + every * self._rng.uniform(0.5, 1.5)
        while await self._pause(0.02):
            if self._load.taken >= until:
                return True
        return False

    async def _pause(self, seconds: float) -> bool:
        """Waits; returns whether the reign goes on."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return not self._over.is_set()

    def _free_runner(self) -> str:
        """Returns a runner without a failure in progress, if there is one; otherwise any runner."""
        free = [name for name in self._runners if not self._locks[name].locked()]
        return self._rng.choice(free or self._runners)

    async def _end_runner(self, number: signal.Signals) -> None:
        name = self._free_runner()
        async with self._locks[name]:
            self._outcome.troubles["runner killed" if number is signal.SIGKILL else "runner drained"] += 1
            if number is signal.SIGKILL:
                self._outcome.kills.append((time.monotonic(), "runner"))
            if self._roles:
                self._roster.change(name, role=self._rng.choice(self._roles))
            await self._restart(name, number)
            await self._mostly_here([name])

    async def _restart(self, name: str, number: signal.Signals) -> None:
        """Ends and restarts a service. On SIGTERM it must end in time with status 0, unless it has just started."""
        status = await asyncio.to_thread(self._roster.end, name, number)
        assert number is signal.SIGKILL or status in (0, -signal.SIGTERM), f"{name} ended with status {status}"
        self._roster.start_one(name)

    async def _mostly_here(self, any_of: Iterable[str]) -> None:
        if self._rng.random() >= EARLY:
            await self._is_here(any_of)

    async def _is_here(self, any_of: Iterable[str]) -> None:
        """Returns once the scheduler knows one of these runners, or when the reign is over."""
        async with AdminClient(self._roster.admin_address) as admin:
            while await self._pause(0.1):  # the first pause also lets the scheduler notice that the runner is gone
                with contextlib.suppress(RosterError):
                    status = await admin.get_status(deadline_s=2)
                    here = {runner.id for runner in status.runners} | {runner.id for runner in status.held_back}
                    if here & set(any_of):
                        return

    async def _kill_one(self, what: str, pids: Callable[[], list[int]]) -> None:
        async with self._locks["scheduler"]:
            found = await asyncio.to_thread(pids)
            if found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._rng.choice(found), signal.SIGKILL)
                    self._outcome.troubles[what] += 1
