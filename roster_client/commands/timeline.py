"""`roster timeline`: shows recorded steps as a picture, a trace for Perfetto, and a table."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from roster_client.options.addresses import DEFAULT_ADMIN, Admin
from roster_client.options.connection import credentials
from roster_client.timeline.lanes import num_columns, occupancy, request_order
from roster_client.timeline.live import record_live
from roster_client.timeline.picture import Across, check_picture, draw
from roster_client.timeline.recording import MOST_BYTES, Recording, read_recordings, recording_writer
from roster_client.timeline.trace_events import write_trace

CUT_OFF = "The recording ends after its first {steps:,} steps: it has reached {mb} MB."


def timeline(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Recordings from `roster demo --record`, `roster simulate --timeline` or --live, in panel order.",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Picture to write (.svg, .html, .png, .pdf); may be repeated."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Also write a trace that ui.perfetto.dev opens (JSON).")
    ] = None,
    live: Annotated[
        float | None,
        typer.Option("--live", min=0.1, help="First record the service at --admin to FILE for these seconds."),
    ] = None,
    across: Annotated[Across, typer.Option("--across", help="Unit of the picture's horizontal axis.")] = (Across.STEPS),
    title: Annotated[str, typer.Option("--title", help="Title of the picture.")] = "",
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Draw the roster over time: slots down, steps across, a colour per request, prefill darker than decode.

    Several recordings become stacked panels with a common horizontal scale.
    Example: roster demo --record demo.jsonl && roster timeline demo.jsonl -o demo.svg
    """
    files, pictures = files or [], out or []
    for picture in pictures:
        check_picture(picture)
    if live is not None:
        if len(files) != 1:
            raise ValueError("--live records to a single FILE: name exactly one")
        with recording_writer(files[0]) as recorder:
            if recorder is not None:
                asyncio.run(record_live(admin, credentials(), recorder, live))
                if recorder.cut_off:
                    typer.echo(CUT_OFF.format(steps=recorder.num_steps, mb=MOST_BYTES >> 20), err=True)
    if not files:
        raise ValueError("name a recording: make one with `roster demo --record FILE` or with --live SECONDS")
    recordings = _read(files)
    for picture in pictures:
        draw(picture, recordings, across, title)
    if trace is not None:
        write_trace(trace, recordings)
    Console().print(_table(recordings))


def _read(files: list[Path]) -> list[Recording]:
    """Returns the files' recordings, except those without steps."""
    try:
        recordings = [recording for file in files for recording in read_recordings(file)]
    except OSError as error:
        raise ValueError(f"{error.filename} can't be read: {error.strerror}") from error
    return [recording for recording in recordings if recording.steps]


def _table(recordings: list[Recording]) -> Table:
    table = Table()
    for heading in ("recording", "requests", "steps", "seconds", "empty slots", "empty while requests wait"):
        table.add_column(heading, justify="left" if heading == "recording" else "right")
    for recording in recordings:
        filled, steps = occupancy(recording.steps), recording.steps
        seconds = max(step.end_s for step in steps) - min(step.begin_s for step in steps)
        table.add_row(
            recording.title,
            f"{len(request_order([Recording('', {}, steps)])):,}",
            f"{num_columns(recording):,}",
            f"{seconds:.2f}",
            f"{filled.empty_share:.1%}",
            f"{filled.wasted_share:.1%}",
        )
    return table
