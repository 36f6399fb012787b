"""Reads single keys from a terminal, without Enter and without echo."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

END = ""
"""The queue's item when the terminal is gone."""


@asynccontextmanager
async def keys_pressed() -> AsyncIterator[asyncio.Queue[str]]:
    """Yields a queue of keys, one character each; without a terminal on standard input it stays empty."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield keys
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    former = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)  # Ctrl-C stays a signal; keys typed before are kept

    def read() -> None:
        try:
            pressed = os.read(descriptor, 64)
        except OSError:
            pressed = b""
        if not pressed:
            loop.remove_reader(descriptor)
            keys.put_nowait(END)
        for key in pressed.decode(errors="replace"):
            keys.put_nowait(key)

    loop.add_reader(descriptor, read)
    try:
        yield keys
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, former)
