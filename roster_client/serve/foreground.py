"""`roster serve`: runs both services on this machine, with interleaved logs, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console
from rich.markup import escape

from roster_client.options.connection import credentials
from roster_client.serve.gateway import GATEWAY, Gateway, is_banner, is_early_failure
from roster_client.serve.signals import cancelled_by_signals
from roster_client.serve.stack import Endpoints, NotReadyError, ServiceDiedError, Stack
from roster_client.terminal.exit_codes import ExitCode
from roster_client.terminal.log_view import LogView
from roster_protos import inference_pb2 as pb


async def serve(
    console: Console,
    endpoints: Endpoints,
    scheduler: dict[str, object],
    runner: dict[str, object],
    ready_timeout_s: float,
    gateway: Gateway | None = None,
) -> ExitCode:
    """Runs both services, and the gateway if one is given.

    Returns OK after a signal or `roster drain`, FAILED if one of them exits otherwise, or is not ready within
    `ready_timeout_s`.
    """
    view = LogView(console)
    is_ready = asyncio.Event()
    if gateway is not None:
        scheduler = {**scheduler, **gateway.flags}

    def show(name: str, line: str) -> None:
        if not (name == GATEWAY and (is_banner(line) or (is_early_failure(line) and not is_ready.is_set()))):
            view.line(name, line)

    stack = Stack(endpoints, scheduler=scheduler, runner=runner, on_line=show, credentials=credentials())
    try:
        with cancelled_by_signals():
            async with stack:
                started = time.monotonic()
                with view.waiting("Starting the scheduler, loading the model ..."):
                    model = await stack.wait_ready(ready_timeout_s)
                if gateway is not None:
                    with view.waiting("Starting the gateway ..."):
                        await gateway.start(stack)
                is_ready.set()
                _announce(console, endpoints, model, time.monotonic() - started, gateway)
                return _failed(console, await stack.wait_death())  # says so before the others have finished
    except asyncio.CancelledError:
        console.print("Stopped.", highlight=False)
        return ExitCode.OK
    except (ServiceDiedError, NotReadyError) as error:
        return _failed(console, error)


def _failed(console: Console, error: Exception) -> ExitCode:
    if isinstance(error, ServiceDiedError) and error.drained:
        console.print("Drained and stopped.", highlight=False)
        return ExitCode.OK
    console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
    return ExitCode.FAILED


def _announce(
    console: Console, endpoints: Endpoints, model: pb.GetModelResponse, seconds: float, gateway: Gateway | None
) -> None:
    console.print(
        f"[bold green]Ready[/] after {seconds:.0f} s: {escape(model.name)} ({model.architecture}, context "
        f"{model.context_length:,}) at {endpoints.listen}, admin {endpoints.admin_listen or 'off'}.\n"
        f'Try: roster generate --server {endpoints.listen} "Why is the sky blue?"   (Ctrl-C stops the services)',
        highlight=False,
        soft_wrap=True,
    )
    if gateway is not None:
        console.print(f"OpenAI API: {gateway.url}", highlight=False, soft_wrap=True)
        console.print(f"Try: {escape(gateway.curl_line(model))}", highlight=False, soft_wrap=True)
