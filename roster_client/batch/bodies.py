"""A request's body, as of OpenAI's chat completions and completions, as messages of `roster.v1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roster_client.batch.fields import (
    SAMPLING,
    BadField,
    check_names,
    given,
    sampling_options,
    text,
    whole_number,
    yes_or_no,
)
from roster_client.batch.input_file import CHAT
from roster_client.client.requests import Options, build_request
from roster_protos import inference_pb2 as pb

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. Chats have none."""

BOTH_FIELDS = {"model", "max_tokens", "logprobs", "response_format", *SAMPLING}
CHAT_FIELDS = BOTH_FIELDS | {"messages", "max_completion_tokens", "top_logprobs"}
COMPLETION_FIELDS = BOTH_FIELDS | {"prompt"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for."""

    requests: list[pb.GenerateRequest]
    """One per prompt; a chat has one."""
    model: str | None
    logprobs: int | None
    """Number of alternatives of each token; None: no log-probabilities."""
    tokens_field: str
    """Name of the field that bounds the answer."""


def asked(url: str, body: Mapping[str, Any]) -> Asked:
    """Returns what a body of this endpoint asks for. Raises BadField."""
    fields = given(body)
    check_names(fields, CHAT_FIELDS if url == CHAT else COMPLETION_FIELDS)
    options = sampling_options(fields)
    model = text("model", fields["model"]) if "model" in fields else None
    field = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    if field in fields:
        options["max_tokens"] = whole_number(field, fields[field])
    if url == CHAT:
        logprobs = _chat_logprobs(fields)
        prompts = [pb.Prompt(chat=_chat(fields))]
    else:
        options.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
        logprobs = whole_number("logprobs", fields["logprobs"]) if "logprobs" in fields else None
        prompts = _prompts(fields)
    if logprobs is not None:
        options["logprobs"] = logprobs
    return Asked([_request(prompt, options) for prompt in prompts], model, logprobs, field)


def _request(prompt: pb.Prompt, options: Options) -> pb.GenerateRequest:
    try:
        request = build_request([0], options)
    except (TypeError, ValueError) as error:  # two constraints
        raise BadField("response_format", str(error)) from None
    request.prompt.CopyFrom(prompt)
    return request


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    wanted = yes_or_no("logprobs", fields.get("logprobs", False))
    if "top_logprobs" not in fields:
        return 0 if wanted else None
    top = whole_number("top_logprobs", fields["top_logprobs"])
    if not wanted and top:
        raise BadField("top_logprobs", "top_logprobs requires logprobs: true")
    return top if wanted else None


def _chat(fields: Mapping[str, Any]) -> pb.Chat:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages must be a list that is not empty")
    return pb.Chat(messages=[_message(f"messages[{place}]", message) for place, message in enumerate(messages)])


def _message(name: str, message: Any) -> pb.ChatMessage:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadField(name, f"{name} must be an object with role and content")
    for key, value in message.items():
        if key not in ("role", "content") and value not in (None, []):
            raise BadField(f"{name}.{key}", f"{name}.{key} is not supported: remove it")
    parts = [pb.ContentPart(text=part) for part in _texts(f"{name}.content", message.get("content"))]
    return pb.ChatMessage(role=text(f"{name}.role", message["role"]), parts=parts)


def _texts(name: str, content: Any) -> list[str]:
    """Returns the texts of a message's content: text, a list of text parts, or null, which is no text."""
    if content is None:
        return [""]
    if not isinstance(content, list):
        return [text(name, content)]
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or set(part) != {"type", "text"}:
            raise BadField(f"{name}[{place}]", f'{name}[{place}] must be {{"type": "text", "text": ...}}')
        texts.append(text(f"{name}[{place}].text", part["text"]))
    return texts


def _prompts(fields: Mapping[str, Any]) -> list[pb.Prompt]:
    """Returns the prompts of a completion: text or token ids, one or a list of them."""
    prompt = fields.get("prompt")
    many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return [_prompt(one) for one in many]


def _prompt(prompt: Any) -> pb.Prompt:
    if isinstance(prompt, list) and prompt:
        return pb.Prompt(token_ids=pb.TokenIds(ids=[whole_number("prompt", item) for item in prompt]))
    if not isinstance(prompt, str) or not prompt:
        raise BadField("prompt", "prompt must be text or token ids, not empty, or a list of them")
    return pb.Prompt(text=text("prompt", prompt))
