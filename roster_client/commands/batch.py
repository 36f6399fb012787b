"""`roster batch`: answers the requests of a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roster_client.options.addresses import DEFAULT_SERVER
from roster_client.options.connection import credentials
from roster_client.options.from_settings import BothSettings
from roster_client.options.sampling import Tenant

errors = Console(stderr=True)


def batch(
    context: typer.Context,
    requests: Annotated[
        Path, typer.Argument(metavar="IN", exists=True, dir_okay=False, help="Requests, a JSON object per line.")
    ],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT", dir_okay=False, help="Answers; requests that it has are not sent again.")
    ],
    server: Annotated[
        str | None, typer.Option("--server", "-s", envvar="ROSTER_SERVER", help="Address of a running server.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Start both services for this model, and stop them at the end.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", dir_okay=False, help="With --model: file for the services' output.")
    ] = None,
    tenant: Tenant = "",
    any_model: Annotated[bool, typer.Option("--any-model", help="Answer lines that name another model, too.")] = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=65536, help="Maximum number of requests in flight.")
    ] = 4096,
) -> None:
    """Answer a file of requests in the format of OpenAI's Batch API. The same command continues a run that stopped.

    With --model it takes settings of both services, as docs/settings.md.
    """
    from roster_client.batch.job import Job, run_job
    from roster_client.batch.servers import OwnServices, RunningServer, Server
    from roster_common.setting_options import option

    settings = BothSettings.of(context)
    own = settings.scheduler | settings.runner
    source = context.get_parameter_source("server")
    if model is not None and source is not None and source.name == "COMMANDLINE":
        raise ValueError("--server names a running server, --model starts one: give one of them")
    if model is None and (own or log is not None):
        name = option(next(iter(own), "log"))
        raise ValueError(f"{name} is for services that --model starts: add --model, or omit it")
    where: Server
    if model is None:
        where = RunningServer(server or DEFAULT_SERVER, tenant, credentials())
    else:
        where = OwnServices(model, own, tenant, log, errors)
    job = Job(requests, answers, any_model, concurrency)
    raise typer.Exit(asyncio.run(run_job(job, where, errors)))
