"""The options that the commands of `roster bench` share, as a dataclass.

A command that runs a load takes one `RunOptions`; `takes_run_options` exposes its fields to typer as options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roster_client.options.addresses import DEFAULT_SERVER
from roster_client.options.from_fields import takes

Server = Annotated[str, typer.Option("--server", "-s", envvar="ROSTER_SERVER", help="gRPC API of a Roster server.")]
OpenAI = Annotated[
    str, typer.Option("--openai", help="Load this OpenAI-compatible endpoint instead: http://host:port/v1.")
]
Admin = Annotated[
    str | None,
    typer.Option("--admin", envvar="ROSTER_ADMIN", help="Admin API of the server, to sample its batch fill."),
]
Model = Annotated[str, typer.Option("--model", help="Model name for --openai (default: the first it lists).")]
Chat = Annotated[bool, typer.Option("--chat", help="With --openai: chat completions instead of completions.")]
ApiKey = Annotated[
    str, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="With --openai: its API key.", show_default=False)
]
ExtraBody = Annotated[str, typer.Option("--extra-body", help="With --openai: JSON merged into every request.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="With --openai: tokenizer.json of the model, for exact prompt lengths."),
]
CallsOption = Annotated[
    str, typer.Option("--calls", help="gRPC calls: `session` (many requests per stream) or `generate`.")
]
Sessions = Annotated[int, typer.Option("--sessions", min=1, help="Session streams per tenant.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="CSV of requests (bench/traces/README.md), optionally .gz.")
]
PromptLengths = Annotated[
    str | None,
    typer.Option("--prompt", help="Prompt lengths without a trace: 128, uniform:16-256, lognormal:200,1.2, ..."),
]
OutputLengths = Annotated[
    str | None, typer.Option("--output", help="Output lengths without a trace, in the same form.")
]
Requests = Annotated[int, typer.Option("--requests", "-n", min=1, help="Number of requests.")]
PromptDivisor = Annotated[int, typer.Option("--prompt-divisor", min=1, help="Divisor of prompt lengths.")]
OutputDivisor = Annotated[int, typer.Option("--output-divisor", min=1, help="Divisor of output lengths.")]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="Assign the requests to this many tenants in turn.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Requests before the start, not recorded.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0.001, help="Seconds after which a request is abandoned.")
]
NaturalEnds = Annotated[bool, typer.Option("--natural-ends", help="Let the model stop before the requested length.")]
NoSpeculate = Annotated[bool, typer.Option("--no-speculate", help="Forbid the server to draft tokens (gRPC).")]
TtftTarget = Annotated[float, typer.Option("--ttft-target-ms", min=0, help="TTFT target of goodput.")]
ItlTarget = Annotated[float, typer.Option("--itl-target-ms", min=0, help="Goodput's target of a request's mean ITL.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of arrivals, jitter and lengths.")]
Salt = Annotated[
    int | None,
    typer.Option("--prompt-salt", min=0, help="Salt of the prompts' content (default: random, so none is cached)."),
]
Name = Annotated[str, typer.Option("--name", help="Name of the system in tables (default: its policy or host).")]
Card = Annotated[str, typer.Option("--card", help="Hardware of the system, if it is another machine.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder of records and report (default: bench-DATE-TIME).")
]
ParquetRecords = Annotated[bool, typer.Option("--parquet", help="Also write the records as Parquet.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run from the command line, checked only for their types, in the order of `--help`."""

    server: Server = DEFAULT_SERVER
    openai: OpenAI = ""
    admin: Admin = None
    model: Model = ""
    chat: Chat = False
    api_key: ApiKey = ""
    extra_body: ExtraBody = "{}"
    tokenizer: Tokenizer = None
    calls: CallsOption = "session"
    sessions: Sessions = 1
    trace: TraceFile = None
    prompt: PromptLengths = None
    output: OutputLengths = None
    requests: Requests = 500
    prompt_divisor: PromptDivisor = 1
    output_divisor: OutputDivisor = 1
    tenants: Tenants = 1
    warmup: Warmup = 4
    timeout: Timeout = None
    natural_ends: NaturalEnds = False
    no_speculate: NoSpeculate = False
    ttft_target_ms: TtftTarget = 1000
    itl_target_ms: ItlTarget = 100
    seed: Seed = 0
    prompt_salt: Salt = None
    name: Name = ""
    card: Card = ""
    out: Out = None
    parquet: ParquetRecords = False


takes_run_options = takes(RunOptions, own_after="requests")
"""Decorates a command of (RunOptions, *, its own options) so that typer sees all options."""
