"""`roster generate` and `roster chat`: print a server's answers on the terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from roster_client.client.recording import Recording, recordable
from roster_client.client.requests import Message, Prompt, build_request
from roster_client.client.sync_client import SyncRosterClient
from roster_client.options.addresses import DEFAULT_SERVER, Server
from roster_client.options.connection import credentials
from roster_client.options.sampling import (
    MaxTokens,
    Record,
    Regex,
    Schema,
    Seed,
    Speculate,
    Stop,
    System,
    Temperature,
    Tenant,
    Timeout,
    TopK,
    TopP,
    request_options,
)
from roster_client.terminal.answer_printer import AnswerPrinter, completion_as_dict, is_whole
from roster_client.terminal.chat import ChatSession
from roster_client.terminal.exit_codes import ExitCode

errors = Console(stderr=True)


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt, or '-' to read it from standard input.")],
    server: Server = DEFAULT_SERVER,
    tenant: Tenant = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int | None, typer.Option("--n", "-n", min=1, max=64, help="Number of answers.")] = None,
    schema: Schema = None,
    regex: Regex = None,
    speculate: Speculate = None,
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer, no statistics.")] = False,
    record: Record = None,
) -> None:
    """Stream the answer to one prompt, sent as a user message if the model has a chat template, unless --raw."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = request_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        n=n,
        json_schema=schema.read_text("utf-8") if schema is not None else None,
        regex=regex,
        speculate=speculate,
    )
    with SyncRosterClient(server, tenant=tenant, credentials=credentials()) as client:
        request = build_request(_question(client, text, system, raw), options, raw=raw)
        if record is not None:
            recordable(request)
        with client.send(request, deadline_s=timeout) as stream:
            if not as_json:
                AnswerPrinter(sys.stdout, errors, live=n in (None, 1), quiet=quiet).consume(stream)
            completion = stream.completion()
        if record is not None:
            Recording.of(request, completion, client.get_model(deadline_s=10)).write(record)
    if as_json:
        typer.echo(json.dumps(completion_as_dict(completion), ensure_ascii=False))
    if not is_whole(completion):
        raise typer.Exit(ExitCode.INCOMPLETE)


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
    """Chat with the model; each message is sent with the history. Ctrl-C stops an answer, Ctrl-D exits."""
    console = Console()
    options = request_options(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    with SyncRosterClient(server, tenant=tenant, credentials=credentials()) as client:
        model = client.get_model(deadline_s=10)
        if not model.chat_template:
            raise ValueError(f"{model.name} has no chat template: use `roster generate --raw`")
        console.print(f"{escape(model.name)} at {server}. /help lists the commands.", style="dim", highlight=False)
        if sys.stdin.isatty():
            import readline  # noqa: F401  (input() then edits lines and keeps a history)
        ChatSession(client, console, options, system).run(lambda: input("> " if sys.stdin.isatty() else ""))


def _question(client: SyncRosterClient, text: str, system: str, raw: bool) -> Prompt:
    if not system:
        return text
    if raw or not client.get_model(deadline_s=10).chat_template:
        raise ValueError("--system requires a model with a chat template and excludes --raw")
    return [Message("system", system), Message("user", text)]
