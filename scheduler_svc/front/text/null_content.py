"""Chat templates for messages whose content is null or absent, as of an assistant that only calls tools.

A template's author may handle null, and then sees it. Where the template fails with null, or writes the word "None", it
gets "" instead, from a prefix of the template. `transformers` renders a message in the same way where it can, and
fails otherwise. The gateway renders the template, so it must be in the source: minijinja and Jinja both run the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduler_svc.front.text.chat_template import ChatTemplateError

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]

_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_MARK = "roster"
_PREFIX = """\
{%- set roster = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if (message.content is not defined or message.content is none) and (CONDITION) -%}
{%- set roster.messages = roster.messages + [dict(message, content='')] -%}
{%- else -%}
{%- set roster.messages = roster.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = roster.messages -%}
"""
_CONDITIONS = {
    (False, False): "true",
    (False, True): "not message.tool_calls",
    (True, False): "message.tool_calls",
}
"""By whether the template takes null without, and with tool calls."""


def with_null_content(template: str, render: Render) -> str:
    """Returns the template, with a prefix if it can't take a message whose content is null.

    `render`: renders messages with the template. Raises ChatTemplateError.
    """
    takes = (_takes_null(render, {}), _takes_null(render, {"tool_calls": [_CALL]}))
    condition = _CONDITIONS.get(takes)
    return template if condition is None else _PREFIX.replace("CONDITION", condition) + template


def _takes_null(render: Render, more: Mapping[str, Any]) -> bool:
    """Returns whether the template renders null, or fails in the same way with "", which then would not help."""
    null, empty = (_rendered(render, {"role": "assistant", "content": content, **more}) for content in (None, ""))
    return empty is None or (null is not None and null.count("None") == empty.count("None"))


def _rendered(render: Render, message: Mapping[str, Any]) -> str | None:
    """Returns the text of a conversation with the message; None if the template fails."""
    try:
        return render([{"role": "user", "content": _MARK}, message, {"role": "user", "content": _MARK}], True)
    except ChatTemplateError:
        return None
