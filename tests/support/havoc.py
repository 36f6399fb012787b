"""What breaks things under a load: deaths and drains of every process, an illness, swaps of the policy."""

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
"""Part of the restarts after which the next may come while the process still starts."""
POLICIES = ("fcfs", "orca", "fair", "sjf", "priority", "deadline")
ILLNESSES = choice(["error", "kill", "broken"], in_ci=["error"])
"""What an ill runner does with whatever it is sent; those that end the process cost a start each time."""


class Havoc:
    """One kind of trouble a method, again and again until `reign` is over; then everything is there and well.

    Each comes about `every` requests of the load, so that there is as much of it however slow the machine is. Most of
    the time what was ended may serve again before it is ended next; sometimes it dies while it starts. A process has
    one trouble at a time.
    """

    def __init__(self, roster: RosterProcesses, load: Load, seed: int, runners: Sequence[str]) -> None:
        self._roster = roster
        self._load = load
        self._outcome = load.outcome
        self._rng = random.Random(seed)
        self._locks = {name: asyncio.Lock() for name in ("scheduler", *runners)}
        self._runners = runners
        self._over = asyncio.Event()

    @asynccontextmanager
    async def reign(self, *troubles: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """These troubles meanwhile. Each ends with what it has begun, and the first that raises raises here."""
        tasks = [asyncio.create_task(trouble) for trouble in troubles]
        try:
            yield
        finally:
            self._over.set()
            await asyncio.gather(*tasks)

    async def kills(self, every: int) -> None:
        """A runner dies and is started again."""
        while await self._reached(every):
            await self._end_runner(signal.SIGKILL)

    async def leaves(self, every: int) -> None:
        """A runner is told to leave, and is started again."""
        while await self._reached(every):
            await self._end_runner(signal.SIGTERM)

    async def illness(self, every: int, for_s: float) -> None:
        """A runner loses whatever it is sent, for so long. Then one that is well takes its place."""
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
        """The scheduler dies, or is drained, by turns, and is started again."""
        kill = self._rng.random() < 0.5
        while await self._reached(every):
            async with self._locks["scheduler"]:
                kill = not kill
                # Counted first: its streams hear of a drain before it has ended.
                self._outcome.troubles["scheduler killed" if kill else "scheduler drained"] += 1
                if kill:
                    self._outcome.kills.append((time.monotonic(), "scheduler"))
                await self._restart("scheduler", signal.SIGKILL if kill else signal.SIGTERM)
                await self._mostly_here(self._runners)

    async def workers(self, every: int) -> None:
        """A front worker dies: the scheduler starts another."""
        while await self._reached(every):
            await self._kill_one("front worker killed", lambda: self._roster.children("scheduler"))

    async def mask_processes(self, every: int) -> None:
        """A mask process dies: the scheduler starts another."""
        while await self._reached(every):
            await self._kill_one("mask process killed", self._roster.mask_processes)

    async def policies(self, every: int) -> None:
        """Another policy decides."""
        async with AdminClient(self._roster.admin_address) as admin:
            while await self._reached(every):
                with contextlib.suppress(RosterError):  # the scheduler is being started
                    await admin.set_policy(self._rng.choice(POLICIES), deadline_s=2)
                    self._outcome.troubles["policy swapped"] += 1

    # ------------------------------------------------------------------ how

    async def _reached(self, every: int) -> bool:
        """Waits until about so many more requests have been taken up; returns whether the reign goes on."""
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
        """One that has no trouble, if there is any."""
        free = [name for name in self._runners if not self._locks[name].locked()]
        return self._rng.choice(free or self._runners)

    async def _end_runner(self, number: signal.Signals) -> None:
        name = self._free_runner()
        async with self._locks[name]:
            self._outcome.troubles["runner killed" if number is signal.SIGKILL else "runner drained"] += 1
            if number is signal.SIGKILL:
                self._outcome.kills.append((time.monotonic(), "runner"))
            await self._restart(name, number)
            await self._mostly_here([name])

    async def _restart(self, name: str, number: signal.Signals) -> None:
        """Ends a service and starts it again. On SIGTERM it must end in time with status 0, unless it just began."""
        status = await asyncio.to_thread(self._roster.end, name, number)
        assert number is signal.SIGKILL or status in (0, -signal.SIGTERM), f"{name} ended with status {status}"
        self._roster.start_one(name)

    async def _mostly_here(self, any_of: Iterable[str]) -> None:
        if self._rng.random() >= EARLY:
            await self._is_here(any_of)

    async def _is_here(self, any_of: Iterable[str]) -> None:
        """Returns once the scheduler knows one of these runners, or when the reign is over."""
        async with AdminClient(self._roster.admin_address) as admin:
            while await self._pause(0.1):  # also for the scheduler to notice that it is gone
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
