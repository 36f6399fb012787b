"""`roster policy list|show|set`: shows the policies and their parameters, and changes the current one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console

from roster_client.client.admin import AdminClient
from roster_client.options.addresses import DEFAULT_ADMIN, Admin
from roster_client.options.connection import credentials
from roster_client.options.policy_names import policy_names
from roster_client.terminal.policy_view import change_view, policies_view, policy_view
from roster_protos import admin_pb2

Answer = TypeVar("Answer")

DEADLINE_S = 30.0
"""The server imports a policy's package, which may take seconds."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

policy_app = typer.Typer(
    no_args_is_help=True, help="Show the scheduling policies, and change the current one while streams run."
)


@policy_app.command("list")
def list_policies(admin: Admin = DEFAULT_ADMIN, as_json: AsJson = False) -> None:
    """List the installed policies; the current one is marked."""
    answer = _ask(admin, lambda client: client.list_policies(deadline_s=DEADLINE_S))
    if as_json:
        _print_json(answer)
    else:
        Console().print(policies_view(answer))


@policy_app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="The policy (default: the current one).", autocompletion=policy_names)
    ] = None,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Show a policy's parameters: their types, defaults and, for the current policy, values."""
    answer = _ask(admin, lambda client: client.list_policies(deadline_s=DEADLINE_S))
    policy = _find(answer, name or answer.policy)
    if as_json:
        _print_json(policy)
    else:
        in_force = json.loads(answer.policy_parameters) if policy.name == answer.policy else None
        Console().print(policy_view(policy, in_force))


@policy_app.command("set")
def set_policy(
    name: Annotated[str, typer.Argument(help="The new policy.", autocompletion=policy_names)],
    parameters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Its parameters, with values as JSON; others get their defaults."
        ),
    ] = None,
    retention: Annotated[
        bool, typer.Option("--retention", help="Change what the prefix cache keeps (lru, session) instead.")
    ] = False,
    admin: Admin = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    """Change the policy while streams run; no stream is dropped and no token computed again.

    Examples: roster policy set fcfs step_tokens=512; roster policy set --retention session
    """
    values = dict(_parameter(text) for text in parameters or [])
    change = _ask(admin, lambda client: client.set_policy(name, values, retention=retention, deadline_s=DEADLINE_S))
    if as_json:
        _print_json(change)
    else:
        Console().print(change_view(change), soft_wrap=True)


def _ask(admin: str, question: Callable[[AdminClient], Awaitable[Answer]]) -> Answer:
    async def ask() -> Answer:
        async with AdminClient(admin, credentials=credentials()) as client:
            return await question(client)

    return asyncio.run(ask())


def _find(answer: admin_pb2.ListPoliciesResponse, name: str) -> admin_pb2.PolicyDescription:
    for policy in answer.policies:
        if policy.name == name:
            return policy
    raise ValueError(
        f"there is no policy {name!r}; installed are: {', '.join(policy.name for policy in answer.policies)}"
    )


def _parameter(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE; a value that is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"a parameter has the form KEY=VALUE, for example step_tokens=512; got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _print_json(message: Message) -> None:
    typer.echo(MessageToJson(message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True))
