"""A real vocabulary: SmolLM2's tokenizer and chat template from the runner's cache, if this machine has it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from roster_protos import inference_pb2, plan_pb2
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.tokenizer import ModelText

VOCAB = 49152
TEXT = "In 1984, he said: “hello” — naïve 中文 👩‍👩‍👧‍👦👍🏽\n\n\tdef f(x):\n        return 007  # e\u0301"


@pytest.fixture(scope="module")
def model() -> plan_pb2.Model:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roster"
    folder = next((path.parent for path in cache.glob("*mol*/tokenizer.json")), None)
    if folder is None:
        pytest.skip("SmolLM2 is not in the cache: run `make demo` once")
    return plan_pb2.Model(
        name="smollm2",
        vocab_size=VOCAB,
        context_length=8192,
        eos_token_ids=[2],
        tokenizer=(folder / "tokenizer.json").read_bytes(),
        chat_template=(folder / "chat_template.jinja").read_text(),
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    )


def test_prompts_encode_as_the_library_does(model: plan_pb2.Model) -> None:
    text, library = ModelText(model), Tokenizer.from_buffer(model.tokenizer)
    assert text.encode(TEXT) == library.encode(TEXT).ids
    prompt = inference_pb2.Prompt()
    prompt.chat.messages.add(role="user").parts.add(text=TEXT)
    template = ChatTemplate(model.chat_template, model.special_tokens)
    rendered = template.render([{"role": "user", "content": TEXT}], add_generation_prompt=True)
    assert text.encode_prompt(prompt) == library.encode(rendered, add_special_tokens=False).ids


def test_random_tokens_stream_as_the_library_decodes_them(model: plan_pb2.Model) -> None:
    text, library = ModelText(model), Tokenizer.from_buffer(model.tokenizer)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        tokens = [draw.choice((draw.randrange(VOCAB), draw.randrange(3, 300))) for _ in range(40)]
        choice = text.choice(inference_pb2.GenerateRequest())
        out = ""
        for token in tokens:
            choice.push([token])
            if (piece := choice.take_piece()) is not None:
                out += piece.text
        choice.finish()
        if (piece := choice.take_piece()) is not None:
            out += piece.text
        assert out == library.decode(tokens)
