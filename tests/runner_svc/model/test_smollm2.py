"""The default model, SmolLM2-135M-Instruct: compared with transformers, and its answers are sensible.

ROSTER_TEST_DEVICE selects the backend. The converted model is kept in the user's cache folder, as by a runner, so that
only the first run of the tests converts it.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from runner_svc.catalog.source import model_folder
from runner_svc.hub.packaged import DEFAULT_MODEL, DEFAULT_MODEL_PACKAGE
from runner_svc.model.checkpoint.weights import weights_fingerprint
from runner_svc.settings.runner_settings import default_cache_folder
from tests.support.greedy_driver import RandomDriver
from tests.support.parity import Parity
from tests.support.tested_backend import TESTED, ModelBackend, reference
from tests.support.tested_device import NEEDS_DEVICE

MAX_TOKENS = 8


def is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not is_installed(DEFAULT_MODEL_PACKAGE), reason=f"needs {DEFAULT_MODEL_PACKAGE}"),
    NEEDS_DEVICE,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(DEFAULT_MODEL, default_cache_folder(), lambda what, share: None)


@pytest.fixture(scope="module")
def twin(folder: Path) -> Any:
    return reference(folder, TESTED.smollm2)


@pytest.fixture(scope="module")
def backend(folder: Path) -> ModelBackend:
    return TESTED.load(folder, num_blocks=64, block_size=16, num_slots=4, max_step_tokens=256, precision=TESTED.smollm2)


@pytest.fixture(scope="module")
def tokenizer(backend: ModelBackend) -> Tokenizer:
    return Tokenizer.from_str(backend.model.tokenizer.decode())


def test_the_description_in_hello(backend: ModelBackend) -> None:
    model = backend.model
    assert (model.vocab_size, model.context_length, list(model.eos_token_ids)) == (49152, 8192, [2])
    assert dict(model.special_tokens) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    assert "<|im_start|>" in model.chat_template


def test_the_converted_model_is_what_it_was_before_files_kept_their_blocks(folder: Path) -> None:
    """Or else an upgraded runner would be unlike the others, and multiply more slowly on a CPU."""
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert weights_fingerprint(folder, torch.float32) == "305226be4079e45c01bd2243865630db"


def test_numbers_are_split_into_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.encode("<|im_end|>").ids == [2]


def test_a_byte_without_a_token_is_not_a_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\x04b").tokens == ["a", "b"]


def test_the_capital_of_france(backend: ModelBackend, tokenizer: Tokenizer) -> None:
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(text).ids for text in ("The capital of France is", chat)]
    outputs = RandomDriver(backend, random.Random(1)).generate(prompts, MAX_TOKENS, max_chunk=64)
    for output in outputs:
        assert "Paris" in tokenizer.decode(output)


def test_greedy_output_equals_transformers(backend: ModelBackend, twin: Any, tokenizer: Tokenizer) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [tokenizer.encode(text).ids for text in ("def fibonacci(n):\n", "The 3 primary colours are red,")]
    prompts.append([rng.randrange(17, 49152) for _ in range(rng.randint(20, 60))])
    actual = RandomDriver(backend, rng).generate(prompts, MAX_TOKENS, max_chunk=rng.choice([3, 16, 60]))
    parity = Parity(twin, TESTED.smollm2)
    parity.check(prompts, actual, MAX_TOKENS)
    parity.assert_few_ties()
