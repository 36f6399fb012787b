"""Options of the commands that send requests: tenant, sampling and length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from roster_client.client.requests import Options

Tenant = Annotated[str, typer.Option("--tenant", envvar="ROSTER_TENANT", help="Tenant of the request.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-m", min=1, help="Maximum number of tokens to generate (default: the rest of the context)."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", min=0, help="Sampling temperature; 0 is greedy (default: 1, set by the server)."
    ),
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this total probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="Keep the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the sampling noise (default: random).")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]
Schema = Annotated[
    Path | None, typer.Option("--schema", exists=True, dir_okay=False, help="File with a JSON schema for the answer.")
]
Regex = Annotated[str | None, typer.Option("--regex", help="Regular expression that the whole answer must match.")]
Speculate = Annotated[
    bool | None,
    typer.Option(
        "--speculate/--no-speculate",
        help="Whether tokens may be drafted; this never changes the answer (default: yes, set by the server).",
    ),
]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Deadline of the request, in seconds.")]
Record = Annotated[
    Path | None,
    typer.Option("--record", dir_okay=False, help="File for the request and its tokens, for `roster verify`."),
]
System = Annotated[str, typer.Option("--system", help="System message.")]


def given(**values: Any) -> dict[str, object]:
    """Returns the values that are not None, that is, were given."""
    return {name: value for name, value in values.items() if value is not None}


def request_options(**values: Any) -> Options:
    """Returns a request's options that were given."""
    options: Any = given(**values)
    return options
