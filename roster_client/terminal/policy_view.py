"""The output of `roster policy`."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from roster_protos import admin_pb2


def policies_view(answer: admin_pb2.ListPoliciesResponse) -> RenderableType:
    """Returns a table of the policies; the current one is marked."""
    table = Table()
    for heading in ("", "policy", "what it does", "parameters", "from"):
        table.add_column(heading)
    for policy in answer.policies:
        table.add_row(
            "▶" if policy.name == answer.policy else "",
            escape(policy.name),
            Text(f"can't be used: {policy.problem}", style="red") if policy.problem else escape(policy.summary),
            escape(", ".join(parameter.name for parameter in policy.parameters)),
            escape(policy.distribution),
        )
    return table


def policy_view(policy: admin_pb2.PolicyDescription, in_force: dict[str, Any] | None) -> RenderableType:
    """Returns a policy and its parameters; `in_force`: the parameters' values if it is the current policy."""
    state = "" if in_force is None else ", current"
    headline = Text(f"{policy.name} ({policy.distribution}{state}): {policy.problem or policy.summary}")
    if not policy.parameters:
        return Group(headline, Text("no parameters", style="dim"))
    table = Table(show_lines=True)
    for heading in ("parameter", "default" if in_force is None else "value", "what it does"):
        table.add_column(heading)
    for parameter in policy.parameters:
        value = parameter.default_value or "must be given"
        if in_force is not None and (now := json.dumps(in_force.get(parameter.name))) != parameter.default_value:
            value = f"{now}\n(default: {value})" if parameter.default_value else now
        takes = escape(_takes(json.loads(parameter.schema)))
        table.add_row(f"{escape(parameter.name)}\n[dim]{takes}[/]", escape(value), escape(parameter.description))
    return Group(headline, table)


def change_view(change: admin_pb2.SetPolicyResponse) -> RenderableType:
    """Returns a line that reports a change of the policy."""
    return Text(
        f"policy {change.policy} {change.policy_parameters} replaced {change.former_policy}; "
        f"{change.waiting:,} waiting and {change.running:,} running sequences were ranked again"
    )


def _takes(schema: dict[str, Any]) -> str:
    """Returns a parameter's JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(_takes(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    words = [str(schema.get("type", "anything"))]
    for key, word in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if key in schema:
            words.append(f"{word} {schema[key]}")
    return " ".join(words)
