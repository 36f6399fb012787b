"""Chat templates, rendered in a sandbox in the Jinja dialect that model publishers use.

The dialect is that of `transformers` (5.x, `chat_template_utils`), reimplemented here because the scheduler doesn't
install it: trim_blocks and lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML
escapes, and `{% generation %}` blocks, of which only the body is rendered. The template comes with the model. Messages
are data and never parsed as Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template doesn't compile, or can't render these messages. The message gives the reason."""


class TemplateUnusable(ChatTemplateError):
    """The template can't be used for any messages."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's tokens for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns the statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's chat template, compiled.

    `source`: Jinja. `special_tokens`: variables such as `bos_token` and their text. Raises ChatTemplateError if the
    source doesn't compile. The template runs in this process; for an untrusted one, use template_renderer.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Returns the text of the prompt. Each message has `role` and `content`. Raises ChatTemplateError."""
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template is a program: any exception is due to it and these messages
            raise ChatTemplateError(f"the model's chat template cannot render these messages: {error}") from error
