"""The `roster` command: generate and chat against a server, look at it, or run both services here.

Failures are one red sentence on stderr and an exit status (`exit_codes.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from roster_client.answer_printer import AnswerPrinter, completion_as_dict, is_whole
from roster_client.bench_command import bench_app
from roster_client.calibrate_command import calibrate
from roster_client.chat import ChatSession
from roster_client.client.admin import AdminClient
from roster_client.client.errors import RosterError, UnavailableError
from roster_client.client.health import READINESS, check_health
from roster_client.client.requests import Message, Options, Prompt
from roster_client.client.sync_client import SyncRosterClient
from roster_client.command_credentials import connection_options, credentials
from roster_client.exit_codes import EXPLANATION, ExitCode, exit_code_for
from roster_client.operator_commands import DEFAULT_ADMIN, Admin, drain, keygen
from roster_client.policy_cli import policy_app
from roster_client.policy_names import policy_names
from roster_client.simulate_command import simulate
from roster_client.stack import Endpoints
from roster_client.status_view import status_view
from roster_client.timeline.recording import recording_writer
from roster_client.timeline_command import timeline
from roster_client.top_command import top

errors = Console(stderr=True)


class RosterGroup(TyperGroup):
    """Turns the exceptions that a user can do something about into a sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except RosterError as error:
            fail(_sentence(error), exit_code_for(error))
        except (ValueError, TypeError) as error:
            fail(str(error), ExitCode.USAGE)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    cls=RosterGroup,
    no_args_is_help=True,
    help="Serve language models with continuous batching, and talk to a server.",
    epilog=EXPLANATION,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.callback()(connection_options)
app.command()(drain)
app.command()(keygen)

Server = Annotated[
    str, typer.Option("--server", "-s", envvar="ROSTER_SERVER", help="Address of the gRPC API, host:port.")
]
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
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]
System = Annotated[str, typer.Option("--system", help="System message.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds after which to give up.")]

Model = Annotated[
    str | None, typer.Option("--model", help="What to serve: a local folder, a hub id, or smollm2 (the default).")
]
Device = Annotated[str | None, typer.Option("--device", help="Where the runner computes (default: cpu).")]
Slots = Annotated[int | None, typer.Option("--slots", min=1, help="Sequences that run at once.")]

DEFAULT_SERVER = "127.0.0.1:50061"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer, or '-' to read it from standard input.")],
    server: Server = DEFAULT_SERVER,
    tenant: Tenant = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int | None, typer.Option("--n", "-n", min=1, max=64, help="Number of answers.")] = None,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", exists=True, dir_okay=False, help="JSON schema (a file) that the answer keeps to."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Regular expression that the whole answer matches.")
    ] = None,
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is done.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer: no line of statistics.")] = False,
) -> None:
    """Stream the answer to one prompt. Models with a chat template get it as a user message, unless --raw."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = _options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        n=n,
        json_schema=schema.read_text("utf-8") if schema is not None else None,
        regex=regex,
    )
    with SyncRosterClient(server, tenant=tenant, credentials=credentials()) as client:
        question = _question(client, text, system, raw)
        with client.generate(question, deadline_s=timeout, **options) as stream:
            if not as_json:
                AnswerPrinter(sys.stdout, errors, live=n in (None, 1), quiet=quiet).consume(stream)
            completion = stream.completion()
    if as_json:
        typer.echo(json.dumps(completion_as_dict(completion), ensure_ascii=False))
    if not is_whole(completion):
        raise typer.Exit(ExitCode.INCOMPLETE)


@app.command()
def chat(
    server: Server = DEFAULT_SERVER,
    tenant: Tenant = "",
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Talk with the model; the history goes along. Ctrl-C cuts an answer short, Ctrl-D leaves."""
    console = Console()
    options = _options(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    with SyncRosterClient(server, tenant=tenant, credentials=credentials()) as client:
        model = client.get_model(deadline_s=10)
        if not model.chat_template:
            raise ValueError(f"{model.name} has no chat template: use `roster generate --raw`")
        console.print(f"{escape(model.name)} at {server}. /help lists the commands.", style="dim", highlight=False)
        if sys.stdin.isatty():
            import readline  # noqa: F401  (input() then edits lines and keeps a history)
        ChatSession(client, console, options, system).run(lambda: input("> " if sys.stdin.isatty() else ""))


@app.command()
def status(
    admin: Admin = DEFAULT_ADMIN,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Show the scheduler, its runners and its counts."""
    from google.protobuf.json_format import MessageToJson

    async def get() -> Any:
        async with AdminClient(admin, credentials=credentials()) as client:
            return await client.get_status(deadline_s=10)

    answer = asyncio.run(get())
    if as_json:
        typer.echo(MessageToJson(answer, always_print_fields_with_no_presence=True, preserving_proto_field_name=True))
    else:
        Console().print(status_view(answer))


@app.command()
def health(
    server: Server = DEFAULT_SERVER,
    service: Annotated[
        str, typer.Option("--service", help='What to ask about: "" (liveness), roster.engine or roster.runner (hangs).')
    ] = READINESS,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait for an answer.")] = 5,
) -> None:
    """Exit with 0 if the server takes requests (or what --service asks), with 3 if not. For container health checks."""
    with SyncRosterClient(server, credentials=credentials()) as client:
        state = check_health(client.channel, timeout, service)
    typer.echo(state)
    if state != "SERVING":
        raise typer.Exit(ExitCode.UNAVAILABLE)


@app.command()
def serve(
    model: Model = None,
    device: Device = None,
    slots: Slots = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Scheduling policy (default: fcfs).", autocompletion=policy_names)
    ] = None,
    listen: Annotated[str | None, typer.Option("--listen", help="Address of the gRPC API, host:port.")] = None,
    admin_listen: Annotated[str | None, typer.Option("--admin-listen", help="Address of the admin API.")] = None,
    link: Annotated[str | None, typer.Option("--link", help="ZeroMQ endpoint between the two services.")] = None,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Use free loopback ports, whichever.")] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", min=1, help="Seconds until the model must be loaded.")
    ] = 600,
) -> None:
    """Run both services here until Ctrl-C or SIGTERM. Their other settings come from ROSTER_* variables."""
    from roster_client.serve import serve as run_services

    if free_ports and (listen or admin_listen or link):
        raise ValueError("--free-ports chooses the addresses: leave out --listen, --admin-listen and --link")
    addresses = {"listen": listen, "admin_listen": admin_listen, "link": link}
    endpoints = Endpoints.free() if free_ports else Endpoints.from_settings(**addresses)
    scheduler = _given(policy=policy)
    runner = _given(model=model, device=device, slots=slots)
    code = asyncio.run(run_services(Console(), endpoints, scheduler, runner, ready_timeout))
    raise typer.Exit(code)


@app.command()
def demo(
    model: Model = "smollm2",
    device: Device = "cpu",
    slots: Slots = 3,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, as into a pipe, also on a terminal.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write both runs, step by step, there for `roster timeline`.")
    ] = None,
) -> None:
    """Stream eight prompts at once with few slots: continuously batched, then in static batches, and compare."""
    from roster_client.demo.comparison import demo as run_demo

    console = Console()
    runner = _given(model=model, device=device, slots=slots)
    with recording_writer(record) as recorder:
        status = asyncio.run(run_demo(console, runner, plain=plain or not console.is_terminal, recorder=recorder))
    raise typer.Exit(status)


app.command()(simulate)
app.command()(calibrate)
app.command()(timeline)
app.command()(top)
app.add_typer(policy_app, name="policy")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of `roster`."""
    app(prog_name="roster")


def fail(message: str, code: ExitCode) -> None:
    """Prints one red sentence and leaves."""
    errors.print(f"[red]{escape(message)}[/]", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _question(client: SyncRosterClient, text: str, system: str, raw: bool) -> Prompt:
    if raw or not client.get_model(deadline_s=10).chat_template:
        if system:
            raise ValueError("--system needs a model with a chat template, and no --raw")
        return text
    return [Message("system", system)] * bool(system) + [Message("user", text)]


def _options(**given: Any) -> Options:
    options: Any = _given(**given)
    return options


def _given(**given: Any) -> dict[str, object]:
    return {name: value for name, value in given.items() if value is not None}


def _sentence(error: RosterError) -> str:
    if isinstance(error, UnavailableError):
        return f"No server is ready there: {error}. Is `roster serve` running?"
    return str(error)


if __name__ == "__main__":
    main()
