"""The live view: frames as the service tells its state, keys as they are pressed, whichever comes first."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.live import Live

from roster_client.client.admin import AdminClient
from roster_client.client.errors import RosterError, UnavailableError
from roster_client.top.frame import Menu, frame
from roster_client.top.keyboard import END, keys_pressed
from roster_client.top.load import Load, RecentLooks

RETRY_S = 1.0
DEADLINE_S = 30.0
"""A policy's package is imported meanwhile, which may take seconds."""


class Screen:
    """One run of `roster top` on a terminal."""

    def __init__(self, console: Console, admin: AdminClient, interval_s: float) -> None:
        self._console = console
        self._admin = admin
        self._interval_s = interval_s
        self._looks = RecentLooks()
        self._load: Load | None = None
        self._menu: Menu | None = None
        self._notice = ""

    async def run(self) -> None:
        """Until q is pressed. Raises RosterError if there is no service at the beginning; later it is waited for."""
        self._load = self._looks.take(await anext(self._admin.watch_roster(self._interval_s)))
        async with keys_pressed() as keys:
            with Live(console=self._console, screen=True, auto_refresh=False) as live:
                self._live = live
                self._draw()
                tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._obey(keys))]
                try:
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                finally:
                    for task in tasks:
                        task.cancel()

    async def _follow(self) -> None:
        """Frames as looks come; a service that is away is asked for again and again."""
        while True:
            try:
                async for look in self._admin.watch_roster(self._interval_s):
                    self._load = self._looks.take(look)
                    self._draw()
            except UnavailableError as error:
                self._say(f"the service is away, trying again: {error}")
                await asyncio.sleep(RETRY_S)
                self._notice = ""

    async def _obey(self, keys: asyncio.Queue[str]) -> None:
        """Carries out keys until one of them says to leave."""
        while (key := await keys.get()) not in ("q", "Q", END):
            try:
                await self._press(key)
            except RosterError as error:
                self._say(str(error))

    async def _press(self, key: str) -> None:
        if key in ("p", "P"):
            if self._menu is None:
                listed = await self._admin.list_policies(deadline_s=DEADLINE_S)
                self._menu = Menu(list(listed.policies))
            else:
                self._menu = None
            self._say("")
        elif self._menu is not None and key.isdecimal() and 1 <= int(key) <= len(self._menu.policies):
            name = self._menu.policies[int(key) - 1].name
            self._menu = None
            change = await self._admin.set_policy(name, deadline_s=DEADLINE_S)
            self._say(f"{change.policy} is in force, {change.former_policy} was")

    def _say(self, notice: str) -> None:
        self._notice = notice
        self._draw()

    def _draw(self) -> None:
        if self._load is not None:
            height = self._console.size.height
            self._live.update(frame(self._load, height, self._menu, self._notice), refresh=True)
