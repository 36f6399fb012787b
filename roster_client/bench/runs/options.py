"""What a run of `roster bench` is told: the options that its commands share, and the dataclass that they come to.

A command that runs something takes one `RunOptions`; `takes_run_options` shows typer the fields as options.
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
    str, typer.Option("--openai", help="Drive this OpenAI-compatible endpoint instead: http://host:port/v1.")
]
Admin = Annotated[
    str | None,
    typer.Option("--admin", envvar="ROSTER_ADMIN", help="Admin API of the server, for its batch fill (local default)."),
]
Model = Annotated[str, typer.Option("--model", help="Model name for --openai (default: the first it lists).")]
Chat = Annotated[bool, typer.Option("--chat", help="With --openai: chat completions, not completions.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="With --openai.", show_default=False)]
ExtraBody = Annotated[str, typer.Option("--extra-body", help="With --openai: JSON to merge into every request.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="With --openai: tokenizer.json of the model, for exact prompt lengths."),
]
CallsOption = Annotated[str, typer.Option("--calls", help="Over gRPC: `session` (many a stream) or `generate`.")]
Sessions = Annotated[int, typer.Option("--sessions", min=1, help="Session streams a tenant.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="CSV of requests (bench/traces/README.md), .gz or not.")
]
PromptLengths = Annotated[
    str | None, typer.Option("--prompt", help="No trace: prompt lengths; 128, uniform:16-256, lognormal:200,1.2, ...")
]
OutputLengths = Annotated[str | None, typer.Option("--output", help="No trace: output lengths, likewise.")]
Requests = Annotated[int, typer.Option("--requests", "-n", min=1, help="How many.")]
PromptDivisor = Annotated[int, typer.Option("--prompt-divisor", min=1, help="Prompts this much shorter.")]
OutputDivisor = Annotated[int, typer.Option("--output-divisor", min=1, help="Outputs this much shorter.")]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="Deal the requests to so many tenants in turn.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Requests before the start, not counted.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Give a request up after so many seconds.")]
NaturalEnds = Annotated[bool, typer.Option("--natural-ends", help="Let the model stop before the wanted length.")]
TtftTarget = Annotated[float, typer.Option("--ttft-target-ms", min=0, help="For goodput.")]
ItlTarget = Annotated[float, typer.Option("--itl-target-ms", min=0, help="For goodput: mean of a request.")]
Seed = Annotated[int, typer.Option("--seed", help="Of arrivals, jitter and lengths.")]
Salt = Annotated[
    int | None,
    typer.Option("--prompt-salt", min=0, help="Of the prompts' content (default: drawn, none is cached)."),
]
Name = Annotated[str, typer.Option("--name", help="Of the system, in tables (default: its policy, or the host).")]
Card = Annotated[str, typer.Option("--card", help="What computes there, where it can't be seen from here.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder of records and report (default: bench-DATE-TIME).")
]
ParquetRecords = Annotated[bool, typer.Option("--parquet", help="Write the records as Parquet too.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run is told, as the command line says it: not yet checked beyond the types, in the order of `--help`."""

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
    ttft_target_ms: TtftTarget = 1000
    itl_target_ms: ItlTarget = 100
    seed: Seed = 0
    prompt_salt: Salt = None
    name: Name = ""
    card: Card = ""
    out: Out = None
    parquet: ParquetRecords = False


takes_run_options = takes(RunOptions, own_after="requests")
"""Makes a command of (RunOptions, *, its own options) one whose options typer sees."""
