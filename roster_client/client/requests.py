"""Builds `roster.v1` messages from plain Python arguments.

Options that are not given are not set in the message, so only the server's defaults apply (inference.proto).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict, cast

from roster_common.call_metadata import TENANT_KEY
from roster_protos import inference_pb2 as pb

# Answers may have logprobs of a whole prompt, for which the default limit of 4 MiB is too small.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Detects within a minute that a server has vanished, even while a stream is silent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: `role` is "system", "user", "assistant" or another role of the model's template."""

    role: str
    content: str


class OnDisconnect(Enum):
    """The server's action on a request whose stream is closed or breaks."""

    CANCEL = pb.ON_DISCONNECT_CANCEL
    KEEP = pb.ON_DISCONNECT_KEEP


# A message, or a dict {"role": ..., "content": ...}, where the content is text, None, or a list of text parts
# {"type": "text", "text": ...}.
AnyMessage = Message | Mapping[str, Any]

# The text of a user's message, token ids, or chat messages for the model's template.
Prompt = str | Sequence[int] | Sequence[AnyMessage]


class Options(TypedDict, total=False):
    """Options of a request; ranges, units and defaults as in `GenerateRequest` (inference.proto).

    At most one of `json_schema`, `regex` and `grammar` constrains the output.
    """

    request_id: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_string: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    prompt_token_ids: bool
    priority: int
    ttft_target_ms: int
    itl_target_ms: int
    timeout_ms: int
    on_disconnect: OnDisconnect
    keep_ms: int
    received_token_ids: Sequence[int]
    json_schema: str | Mapping[str, object]
    regex: str
    grammar: str
    adapter: str
    cache_salt: str
    speculate: bool
    conversation_id: str
    kv_retain_s: float
    next_turn_s: float


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"
)  # fmt: skip
_STOP = ("max_tokens", "min_tokens", "ignore_eos", "include_stop_string")
_OUTPUT = ("logprobs", "prompt_logprobs", "skip_special_tokens", "prompt_token_ids")
_CONSTRAINTS = ("json_schema", "regex", "grammar")
_REQUEST = (
    "request_id", "n", "priority", "ttft_target_ms", "itl_target_ms", "timeout_ms", "keep_ms", "adapter",
    "cache_salt", "speculate", "conversation_id", "kv_retain_s", "next_turn_s",
)  # fmt: skip


def build_request(prompt: Prompt, options: Options, *, raw: bool = False) -> pb.GenerateRequest:
    """Builds a GenerateRequest; `raw` as in `build_prompt`.

    Raises TypeError for an unknown option or a value of the wrong type, and ValueError for a number out of the field's
    range. The server checks everything else.
    """
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known are {', '.join(Options.__annotations__)}")
    request = pb.GenerateRequest(prompt=build_prompt(prompt, raw=raw))
    for target, names in (
        (request.sampling, _SAMPLING), (request.stop, _STOP), (request.output, _OUTPUT), (request, _REQUEST)
    ):  # fmt: skip
        for name in names:
            value = options.get(name)
            if value is not None:
                setattr(target, name, value)
    # Accessing a nested message marks it as set, so only those of given options are accessed.
    if bias := options.get("logit_bias"):
        request.sampling.logit_bias.update(bias)
    if strings := options.get("stop"):
        request.stop.strings.extend(strings)
    if token_ids := options.get("stop_token_ids"):
        request.stop.token_ids.extend(token_ids)
    request.received_token_ids.extend(options.get("received_token_ids") or ())
    for name in _CONSTRAINTS:
        value = options.get(name)
        if value is not None:
            if request.HasField("constraint"):
                raise TypeError(f"at most one of {', '.join(_CONSTRAINTS)} can be given")
            setattr(request.constraint, name, value if isinstance(value, str) else json.dumps(value))
    if (on_disconnect := options.get("on_disconnect")) is not None:
        request.on_disconnect = on_disconnect.value
    return request


def build_prompt(prompt: Prompt, *, raw: bool = False) -> pb.Prompt:
    """Builds a Prompt from text, token ids or messages; an empty sequence becomes token ids, which a server refuses.

    Text is a user's message, which the server renders with the model's chat template, if it has one. `raw`: the model
    continues the text instead. Raises TypeError for another type, and for an item that is neither a token id nor a
    message.
    """
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt) if raw else pb.Prompt(user_message=prompt)
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt is text, token ids or messages; got a {type(prompt).__name__}")
    if set(map(type, prompt)) <= {int}:  # what long prompts are: the checks below take milliseconds
        return pb.Prompt(token_ids=pb.TokenIds(ids=cast("Sequence[int]", prompt)))
    messages = [item for item in prompt if isinstance(item, Message | Mapping)]
    if not messages:
        return pb.Prompt(token_ids=pb.TokenIds(ids=[_token_id(item) for item in prompt]))
    if len(messages) != len(prompt):
        raise TypeError("a prompt is either token ids or messages, not both")
    return pb.Prompt(chat=pb.Chat(messages=[_chat_message(message) for message in messages]))


def _chat_message(message: AnyMessage) -> pb.ChatMessage:
    if isinstance(message, Message):
        return pb.ChatMessage(role=message.role, parts=[pb.ContentPart(text=message.content)])
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or "content" not in message:
        raise TypeError(f'a message has the keys "role" and "content"; got {", ".join(map(repr, message)) or "none"}')
    if other := [key for key, value in message.items() if key not in ("role", "content") and value is not None]:
        raise TypeError(f'a message has no other keys than "role" and "content"; got {", ".join(map(repr, other))}')
    return pb.ChatMessage(role=role, parts=[pb.ContentPart(text=text) for text in _texts(content)])


def _texts(content: object) -> Iterator[str]:
    """Yields the texts of a message's content: text, None, or a list of text parts. Raises TypeError."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
            if not isinstance(text, str):
                raise TypeError(f'a part of a message is text or {{"type": "text", "text": ...}}; got {part!r}')
            yield text
    elif content is not None:
        raise TypeError(f"a message's content is text, None or a list of parts; got a {type(content).__name__}")


def call_metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that names the tenant. Raises ValueError for a name that is not printable ASCII."""
    if not (tenant.isascii() and (tenant.isprintable() or not tenant)):
        raise ValueError(f"the tenant must be printable ASCII, got {tenant!r}")
    return ((TENANT_KEY, tenant),) if tenant else ()


def _token_id(item: object) -> int:
    if not isinstance(item, int):
        raise TypeError(f"a prompt is text, token ids or messages; got an item of type {type(item).__name__}")
    return item
