"""`roster top`: shows a service's roster live, or a single frame for scripts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roster_client.client.admin import AdminClient
from roster_client.options.addresses import DEFAULT_ADMIN, Admin
from roster_client.options.connection import credentials
from roster_client.top.frame import frame
from roster_client.top.load import Load, RecentLooks, as_json, load_between
from roster_client.top.screen import Screen

MOST_LINES = 10_000
"""Maximum number of lines of a frame that is not bounded by a screen."""


def top(
    admin: Admin = DEFAULT_ADMIN,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60, help="Seconds between updates.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, over one interval, and exit.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per update instead of drawing.")
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="With --once: also write the frame as SVG.")] = None,
) -> None:
    """Watch the running sequences, queue, KV usage, latency and throughput. Keys change the policy.

    p lists the policies, the key before one selects it while streams run, q quits.
    """
    if svg is not None and (json_lines or not once):
        raise ValueError("--svg writes the frame of --once: use it with --once and without --json")
    console = Console(record=svg is not None)
    if not once and not json_lines and not console.is_terminal:
        raise ValueError("the live view needs a terminal: for a file or a pipe use --once or --json")
    asyncio.run(_run(console, admin, interval, once, json_lines))
    if svg is not None:
        console.save_svg(str(svg), title="roster top")


async def _run(console: Console, target: str, interval_s: float, once: bool, json_lines: bool) -> None:
    async with AdminClient(target, credentials=credentials()) as client:
        if once:
            _print(console, await _one_interval(client, interval_s), json_lines)
        elif json_lines:
            looks = RecentLooks()
            async for look in client.watch_roster(interval_s):
                _print(console, looks.take(look), json_lines)
        else:
            await Screen(console, client, interval_s).run()


async def _one_interval(client: AdminClient, interval_s: float) -> Load:
    """Returns the load between two updates."""
    looks = client.watch_roster(interval_s)
    before = await anext(looks)
    return load_between(before, await anext(looks))


def _print(console: Console, load: Load, json_lines: bool) -> None:
    if json_lines:
        typer.echo(json.dumps(as_json(load), ensure_ascii=False))
    else:
        console.print(frame(load, MOST_LINES, keys=False))
