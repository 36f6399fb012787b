"""The live view of `roster top`: draws a frame for each state of the service and handles keys concurrently."""

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
"""The server imports a policy's package, which may take seconds."""


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
        """Runs until q is pressed. Raises RosterError if the service is not available at first; later it retries."""
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
        """Draws a frame for each snapshot; reconnects while the service is unavailable."""
        while True:
            try:
                async for look in self._admin.watch_roster(self._interval_s):
                    self._load = self._looks.take(look)
                    self._draw()
            except UnavailableError as error:
                self._say(f"the service is unavailable, retrying: {error}")
                await asyncio.sleep(RETRY_S)
                self._notice = ""

    async def _obey(self, keys: asyncio.Queue[str]) -> None:
        """Handles keys until q is pressed or the terminal is gone."""
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
        elif self._menu is not None and (name := self._menu.selected(key)) is not None:
            self._menu = None
            change = await self._admin.set_policy(name, deadline_s=DEADLINE_S)
            self._say(f"policy {change.policy} replaced {change.former_policy}")

    def _say(self, notice: str) -> None:
        self._notice = notice
        self._draw()

    def _draw(self) -> None:
        if self._load is not None:
            height = self._console.size.height
            self._live.update(frame(self._load, height, self._menu, self._notice), refresh=True)
