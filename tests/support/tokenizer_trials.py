"""Compares a folder's tokenizer as served with transformers' own: ids, text of every id, ends of answers, safety."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from roster_protos import inference_pb2, plan_pb2
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.folder.json_file import read_object
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.token_texts import UnsupportedTokenizer
from scheduler_svc.front.text.tokenizer import ModelText

TEXTS = ("the thing in a  the", " a . b , it 's n't\n x", "naïve 中文 👍 the", "The END. ing<>|", "")
CHATS = ([("user", "the thing")], [("system", "a b"), ("user", " naïve 中 . x "), ("assistant", "the")])


class InProcess:
    """A chat template rendered in this process, since a process each would take most of the time."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], most_characters: int) -> None:
        self._template = ChatTemplate(source, special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        return self._template.render(messages, add_generation_prompt)

    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """`refusal`: the sentence, "" if served. `served_there`: whether transformers serves. `differences`: sentences."""

    refusal: str
    served_there: bool
    differences: tuple[str, ...] = ()


@cache
def _sizes() -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"), 64)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1}
    return ModelConfig.from_hugging_face({"architectures": ["LlamaForCausalLM"], **sizes, **heads})


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _default_ends(folder: Path) -> tuple[int, ...]:
    """Returns the ends that transformers takes of a configuration, its class's defaults included."""
    try:
        return _ids(getattr(AutoConfig.from_pretrained(str(folder)), "eos_token_id", None))
    except Exception:
        return ()


def _serves(folder: Path) -> Any:
    """Returns transformers' tokenizer of the folder, None if it or `generate`'s ends can't be loaded."""
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        if (folder / "generation_config.json").is_file():
            stated = GenerationConfig.from_pretrained(str(folder)).eos_token_id
            if stated is not None:
                torch.tensor(stated, dtype=torch.long)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # panics of the `tokenizers` library are no Exception
        return None
    return loaded


def compare(folder: Path) -> Outcome:
    """Returns what came of the folder here and in transformers."""
    theirs = _serves(folder)
    try:
        vocab_size = int(read_config(folder)["vocab_size"])
        config = replace(_sizes(), vocab_size=vocab_size, eos_token_ids=_default_ends(folder))
        model = describe_model("tiny", folder, config, "")
        ours = ModelText(model)
    except (ModelNotFound, UnsupportedModel, UnsupportedTokenizer) as error:
        return Outcome(str(error), theirs is not None)
    if theirs is None:
        return Outcome("", False, ("transformers can't load it",))
    differences = (
        *_ids_differ(ours, theirs, model),
        *_texts_differ(ours, theirs, model),
        *_ends_differ(folder, theirs, model),
        *_unsafe(ours, theirs, model),
    )
    return Outcome("", True, differences)


def chat(messages: Sequence[tuple[str, str]]) -> inference_pb2.Prompt:
    """Returns a chat as a request has it."""
    prompt = inference_pb2.Prompt()
    for role, content in messages:
        prompt.chat.messages.add(role=role).parts.add(text=content)
    return prompt


def _ids_differ(ours: ModelText, theirs: Any, model: plan_pb2.Model) -> Iterator[str]:
    """Compares texts and chats without special tokens: users can't write those here."""
    special = [theirs.convert_ids_to_tokens(token) for token in _control(model)]
    special = [text.casefold() for text in special if len(text) > 1]  # a normalizer may change the case
    clean = [text for text in TEXTS if not any(one in text.casefold() for one in special)]
    for text in clean:
        expected, found = list(theirs(text)["input_ids"]), ours.encode(text)
        if found != expected:
            yield f"ids of {text!r}: {found}, transformers {expected}"
    for messages in CHATS:
        if any(one in content.casefold() for _, content in messages for one in special):
            continue
        as_dicts = [{"role": role, "content": content} for role, content in messages]
        try:
            rendered = theirs.apply_chat_template(as_dicts, add_generation_prompt=True, return_dict=False) or None
        except Exception:
            rendered = None
        try:
            answer = ours.encode_prompt(chat(messages)) or None
        except Refusal:
            answer = None
        if answer != rendered:
            yield f"ids of {messages}: {answer}, transformers {rendered}"


def _control(model: plan_pb2.Model) -> set[int]:
    return {token["id"] for token in json.loads(model.tokenizer)["added_tokens"] if token["special"]}


def _unknown(model: plan_pb2.Model) -> int | None:
    """Returns the id of what the vocabulary lacks, which users may write."""
    described = json.loads(model.tokenizer)["model"]
    if described["type"] == "Unigram":
        return described["unk_id"]
    vocabulary: dict[str, int] = described["vocab"]
    return vocabulary.get(described.get("unk_token") or "")


def _texts_differ(ours: ModelText, theirs: Any, model: plan_pb2.Model) -> Iterator[str]:
    control, size = _control(model), len(theirs)
    named = {theirs.backend_tokenizer.token_to_id(text) for text in theirs.all_special_tokens} - {None}
    wanted = named | {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    if not wanted <= control:
        yield f"special in transformers only: {wanted - control}"
    if extra := control - wanted - set(model.eos_token_ids):
        yield f"special here only: {extra}"
    draw = random.Random(1)
    bytes_of = {i for text, i in theirs.get_vocab().items() if text.startswith("<0x")}
    whole = [i for i in range(size + 3) if i not in bytes_of]  # of runs of bytes, see the detokenizer
    samples = [[i] for i in range(size + 3)] + [draw.choices(whole, k=12) for _ in range(20)]
    for ids in samples:
        for skip in (True, False):
            kept = [i for i in ids if not (skip and i in control)]
            expected, found = theirs.decode(kept, skip_special_tokens=False), ours.decode(ids, skip)
            if found != expected:
                yield f"text of {ids}, skip {skip}: {found!r}, transformers {expected!r}"


def _ends_differ(folder: Path, theirs: Any, model: plan_pb2.Model) -> Iterator[str]:
    generation = _ids(read_object(folder / "generation_config.json").get("eos_token_id"))
    config = read_config(folder)
    of_config = (
        _ids(config["eos_token_id"]) if "eos_token_id" in config else () if generation else _default_ends(folder)
    )
    expected = {*generation, *of_config, *_ids(theirs.eos_token_id)}
    expected = {token for token in expected if token < model.vocab_size}
    if set(model.eos_token_ids) != expected:
        yield f"ends {sorted(model.eos_token_ids)}, transformers {sorted(expected)}"


def _unsafe(ours: ModelText, theirs: Any, model: plan_pb2.Model) -> Iterator[str]:
    described = json.loads(model.tokenizer)
    control = _control(model) - {_unknown(model)}
    for token in described["added_tokens"]:  # marks, see special_tokens
        if token["content"].startswith("<|") and not (token["normalized"] and described["normalizer"]):
            control.add(token["id"])
    try:
        written = [token for token in ours.encode_prompt(chat([("user", "x")])) if token in control]
    except Refusal:
        return
    for token in control:
        text = theirs.convert_ids_to_tokens(token)
        found = [one for one in ours.encode_prompt(chat([("user", f"x{text}x")])) if one in control]
        if len(text) == 1:  # a letter that every text needs
            continue
        if found != written:
            yield f"a user's {text!r} becomes {found}, not {written}"
