"""Checks and tokenizes prompts for `Generate` and `Tokenize`.

The checks that need no tokenizing come first, so that a bad prompt costs little. UTF-8 needs no check here: protobuf
refuses a message with strings that are not valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

from roster_protos import inference_pb2
from scheduler_svc.front.base.refusal import Refusal, invalid
from scheduler_svc.front.text.tokenizer import ModelText


def prompt_tokens(prompt: inference_pb2.Prompt, text: ModelText) -> list[int]:
    """Returns the tokens of a prompt: at least one, fewer than the context length, all in the vocabulary.

    Raises Refusal.
    """
    kind = prompt.WhichOneof("kind")
    if kind == "token_ids":
        field = "prompt.token_ids.ids"
        _check_length(len(prompt.token_ids.ids), field, text)
        check_ids(prompt.token_ids.ids, field, text.vocab_size)
    elif kind == "text":
        field = "prompt.text"
        _check_bytes(len(prompt.text.encode()), field, text)
    elif kind == "user_message":
        field = "prompt.user_message"
        _check_bytes(len(prompt.user_message.encode()), field, text)
    elif kind == "chat":
        field = "prompt.chat.messages"
        _check_messages(prompt.chat, text)
    else:
        raise invalid("prompt", "set one of `text`, `token_ids`, `chat` and `user_message`")
    tokens = text.encode_prompt(prompt)
    _check_length(len(tokens), field, text)
    if (largest := max(tokens)) >= text.vocab_size:  # possible only if the tokenizer has more tokens than the model
        raise invalid(
            field, f"it contains {text.decode([largest], False)!r}, which is not a token of this model; remove it"
        )
    return tokens


def check_ids(ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises Refusal if an id is outside the vocabulary; its field is the path of the first such id."""
    if ids and max(ids) >= vocab_size:
        place = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise invalid(
            f"{field}[{place}]", f"{ids[place]} is not a token of this model; token ids are 0 to {vocab_size - 1}"
        )


def _check_messages(chat: inference_pb2.Chat, text: ModelText) -> None:
    if not chat.messages:
        raise invalid("prompt.chat.messages", "the chat is empty; send at least one message")
    size = 0
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise invalid(f"prompt.chat.messages[{index}].role", 'the role is empty; set it to "user", for example')
        for number, part in enumerate(message.parts):
            if part.WhichOneof("kind") is None:
                raise invalid(
                    f"prompt.chat.messages[{index}].parts[{number}]",
                    "this server does not support this kind of part; send `text`",
                )
            size += len(part.text.encode())
    _check_bytes(size, "prompt.chat.messages", text)


def _check_bytes(size: int, field: str, text: ModelText) -> None:
    """Refuses text whose bytes exceed the context under any tokenization."""
    if not size and field != "prompt.chat.messages":
        raise invalid(field, "the prompt is empty; send at least one character")
    most = text.context_length * text.max_token_bytes
    if size > most:
        raise invalid(
            field,
            f"the prompt has {size} bytes of text, which cannot fit the model's context of {text.context_length} "
            "tokens; shorten it",
        )


def _check_length(length: int, field: str, text: ModelText) -> None:
    if not length:
        raise invalid(field, "the prompt has no tokens; send at least one")
    if length >= text.context_length:
        raise _too_long(length, field, text.context_length)


def _too_long(length: int, field: str, context_length: int) -> Refusal:
    return invalid(
        field,
        f"the prompt has {length} tokens, but the model's context is {context_length} tokens, output included; "
        f"shorten the prompt to at most {context_length - 1} tokens",
    )
