"""`roster serve`: both services on this machine, their logs interleaved, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from protos import inference_pb2 as pb

from .exit_codes import ExitCode
from .stack import Endpoints, NotReadyError, ServiceDiedError, Stack

_COLOURS = {"scheduler": "cyan", "runner": "magenta"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LogView:
    """Prints the services' lines with their names, and a line about loading at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, name: str, text: str) -> None:
        """One line of a service."""
        self._console.print(f"[{_COLOURS[name]}]{name:>9}[/] │ {escape(text)}", highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows that something is awaited, on a terminal only."""
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)
            yield
            return
        with self._console.status(what, refresh_per_second=4):
            yield


async def serve(
    console: Console,
    endpoints: Endpoints,
    scheduler: dict[str, object],
    runner: dict[str, object],
    ready_timeout_s: float,
) -> ExitCode:
    """Runs both services; OK after a signal, FAILED when one dies or they don't become ready in `ready_timeout_s`."""
    view = LogView(console)
    stack = Stack(endpoints, scheduler=scheduler, runner=runner, on_line=view.line)
    try:
        with cancelled_by_signals():
            async with stack:
                started = time.monotonic()
                with view.waiting("Starting the scheduler, loading the model ..."):
                    model = await stack.wait_ready(ready_timeout_s)
                _announce(console, endpoints, model, time.monotonic() - started)
                raise await stack.wait_death()
    except asyncio.CancelledError:
        console.print("Stopped.", highlight=False)
        return ExitCode.OK
    except (ServiceDiedError, NotReadyError) as error:
        console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
        return ExitCode.FAILED


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Within it, SIGINT, SIGTERM and SIGHUP cancel the current task, so that its `finally` blocks stop what runs."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("needs a running task")
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _announce(console: Console, endpoints: Endpoints, model: pb.GetModelResponse, seconds: float) -> None:
    console.print(
        f"[bold green]Ready[/] after {seconds:.0f} s: {escape(model.name)} ({model.architecture}, context "
        f"{model.context_length:,}) at {endpoints.listen}, admin {endpoints.admin_listen or 'off'}.\n"
        f'Try: roster generate --server {endpoints.listen} "Why is the sky blue?"   (Ctrl-C stops both services)',
        highlight=False,
        soft_wrap=True,
    )
