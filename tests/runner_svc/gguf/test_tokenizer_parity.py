"""Converted tokenizers make the tokens and texts of transformers' own conversion, where that follows the file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from runner_svc.gguf.conversion import Conversion
from runner_svc.gguf.tokenizer import write_tokenizer
from tests.support.thoroughness import count
from tests.support.tiny_gguf import byte_level_keys, sentence_piece_keys, tiny_gguf, tiny_model

NUM_TEXTS = count(300, in_ci=30)
WORDS = [
    "the", " the", "  the", "ing", "\n", "\n\n", "\t", "it's", "YOU'LL", "42", "123456", "\xe9t\xe9", "\u4e00",
    "\U0001f642", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<think>", "!?", "\u2581", "a", ".", " ",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="older versions split most texts by GPT-2's rule"
)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", sentence_piece_keys()),
        ("phi3", sentence_piece_keys()),
        ("gemma2", sentence_piece_keys()),
        *(("llama", byte_level_keys(pre)) for pre in ("gpt-2", "llama-bpe", "tekken", "qwen2", "gpt-4o", "smaug-bpe")),
    ],
    ids=["llama", "phi3", "gemma2", "gpt-2", "llama-bpe", "tekken", "qwen2", "gpt-4o", "smaug-bpe"],
)
def test_random_texts(architecture: str, keys: dict[str, Any], tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    vocabulary = {"vocab_size": len(keys["tokenizer.ggml.tokens"])}
    file = tiny_gguf(architecture, tiny_model(architecture, **vocabulary))
    file.keys = {key: value for key, value in file.keys.items() if not key.startswith("tokenizer.")} | keys
    path = file.write(tmp_path / "case.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    write_tokenizer(Conversion.plan(path).tokenizer, tmp_path)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(NUM_TEXTS):
        text = "".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
