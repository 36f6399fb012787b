"""Options of the commands that ask a model: whose call it is, and how tokens are drawn."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from roster_client.client.requests import Options

Tenant = Annotated[str, typer.Option("--tenant", envvar="ROSTER_TENANT", help="Tenant on whose behalf to call.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-m", min=1, help="Most tokens to generate (default: what the context has left)."),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", min=0, help="0 is greedy (default: the server's, 1).")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="Keep the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Seed of the sampling noise (default: drawn by the server).")
]
System = Annotated[str, typer.Option("--system", help="System message.")]


def given(**values: Any) -> dict[str, object]:
    """The values that were given: those of options without a default are None."""
    return {name: value for name, value in values.items() if value is not None}


def request_options(**values: Any) -> Options:
    """The options of a request that were given."""
    options: Any = given(**values)
    return options
