"""`roster batch` as a whole: checks both files, makes the server ready, runs, and says what was done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from roster_client.batch.batch_run import BatchRun, Tally
from roster_client.batch.input_file import count_lines, read_lines
from roster_client.batch.output_file import OutputFile
from roster_client.batch.servers import Ready, Server
from roster_client.offline.own_services import ServicesFailedError
from roster_client.serve.signals import cancelled_by_signals
from roster_client.terminal.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class Job:
    """The files, and how their requests are sent."""

    requests: Path
    answers: Path
    any_model: bool
    concurrency: int


async def run_job(job: Job, server: Server, console: Console) -> ExitCode:
    """Answers the requests that have no answer yet; returns OK if every request of the file has one.

    Returns INCOMPLETE if some have an error instead, INTERRUPTED after a signal, FAILED if the services end. Raises
    ValueError for files that can't be used, OSError, and RosterError if the server is gone.
    """
    if job.answers.exists() and job.answers.samefile(job.requests):
        raise ValueError(f"{job.answers} is the file of the requests: name another file for the answers")
    if not job.requests.is_file():
        raise ValueError(f"{job.requests} is not a file on a disk, which could be read twice: name one")
    total = count_lines(job.requests)
    with OutputFile(job.answers) as output:
        left = sum(not output.has(line) for line in read_lines(job.requests))
        if not left:
            errors = f", {output.failed:,} of them with an error" if output.failed else ""
            has = f"{job.answers} has all {total:,} already{errors}." if total else f"{job.requests} has no requests."
            console.print(has, highlight=False, soft_wrap=True)
            return _status(output)
        if left < total:
            console.print(f"{job.answers} has {total - left:,} of {total:,} already.", highlight=False, soft_wrap=True)
        return await _run(job, server, output, console, total, left)


async def _run(job: Job, server: Server, output: OutputFile, console: Console, total: int, left: int) -> ExitCode:
    tally, code = Tally(), ExitCode.FAILED
    began: float | None = None
    try:
        with cancelled_by_signals():
            async with server.ready() as ready:
                run = BatchRun(ready.client, output, tally, ready.names, job.any_model, job.concurrency)
                began = time.monotonic()
                await _unless_death(run, job.requests, total, left, ready)
        code = _status(output)
    except asyncio.CancelledError:
        code = ExitCode.INTERRUPTED
    except ServicesFailedError as error:
        console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
    finally:
        if began is not None:
            _report(console, job, tally, left, time.monotonic() - began)
    return code


async def _unless_death(run: BatchRun, path: Path, total: int, left: int, ready: Ready) -> None:
    """Runs to the end. Raises ServiceDiedError if one of the batch's own services ends before."""
    work = asyncio.create_task(run.run(path, total, left))
    death = asyncio.create_task(ready.stack.wait_death()) if ready.stack is not None else None
    try:
        await asyncio.wait([task for task in (work, death) if task is not None], return_when=asyncio.FIRST_COMPLETED)
        if death is not None and not work.done():
            raise death.result()
        work.result()
    finally:
        for task in (work, death):
            if task is not None:
                task.cancel()
        await asyncio.wait([work])


def _status(output: OutputFile) -> ExitCode:
    return ExitCode.INCOMPLETE if output.failed else ExitCode.OK


def _report(console: Console, job: Job, tally: Tally, left: int, seconds: float) -> None:
    seconds = max(seconds, 1e-3)
    console.print(
        f"{tally.written:,} of {left:,} requests in {seconds:,.1f} s ({tally.written / seconds:,.1f}/s), "
        f"{tally.prompt_tokens:,} prompt and {tally.output_tokens:,} output tokens "
        f"({tally.output_tokens / seconds:,.0f}/s): {job.answers}",
        highlight=False,
        soft_wrap=True,
    )
    if tally.failed:
        message = f"{tally.failed:,} have an error instead of an answer; the first: {tally.first_error}"
        console.print(f"[red]{escape(message)}[/]", highlight=False, soft_wrap=True)
    if tally.written < left:
        console.print("The same command continues.", highlight=False)
