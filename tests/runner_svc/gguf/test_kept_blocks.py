"""Large models stay in the blocks of their files: the answers are those of the numbers in them, on both decoders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder import cpu_decoder
from runner_svc.gguf import kept_blocks
from runner_svc.model.checkpoint.servable import why_not
from runner_svc.model.decoder_choice import not_by_transformers
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.gguf_conversion import converted_folder
from runner_svc.model.quantization import gguf_method
from runner_svc.weights import cpu_products, int4_matrix
from runner_svc.weights.blocks import grouped
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend, no_progress
from tests.support.mixed_gguf import mixed_gguf
from tests.support.parity import FLOAT32, Parity
from tests.support.thoroughness import choice

MAX_TOKENS = 8


@pytest.mark.parametrize("architecture", choice(["llama", "qwen2", "phi3", "gemma2"], in_ci=["llama"]))
def test_greedy_tokens(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "MOST_PLAIN_WEIGHTS", 0)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    file, model = mixed_gguf(architecture, rng)
    folder = converted_folder(file.write(tmp_path / "mixed.gguf"), tmp_path / "cache", no_progress)
    assert why_not(folder) is None
    assert "set decoder to 'auto'" in str(not_by_transformers(read_config(folder)))
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(length)] for length in (5, 40)]
    sizes: dict[str, Any] = {"num_blocks": 32, "block_size": 16, "num_slots": 2, "max_step_tokens": 64}
    for case in choice(["plain", "kept", "host"], in_ci=rng.sample(["plain", "kept", "host"], 2)):
        monkeypatch.setattr(cpu_decoder, "MAX_PLAIN_WEIGHTS", 2**28 if case == "plain" else 0)
        if case == "kept":
            multiply_in_float32(monkeypatch)  # the others have no product in bfloat16
        if case == "host":
            backend: Any = host_backend(folder, **sizes)
        else:
            backend = TorchBackend.load(str(folder), cache_folder=tmp_path, progress=no_progress, **sizes)
            assert "GGUF Q" in backend.model.weight_formats and "IQ4" not in backend.model.weight_formats
        parity = Parity(model, FLOAT32)
        parity.check(prompts, RandomDriver(backend, rng).generate(prompts, MAX_TOKENS, 30), MAX_TOKENS)
        parity.assert_few_ties()


def multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes dequantized tiles alone: errors of products in bfloat16, which test_formats bounds, grow in such models."""
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: False)
    monkeypatch.setattr(int4_matrix, "can_pack_int4", lambda *_: False)
    monkeypatch.setattr(grouped, "_FEW_ROWS", {1: 0, 2: 0})


def test_small_models_become_plain(tmp_path: Path) -> None:
    file, _ = mixed_gguf("llama", random.Random(0))
    folder = converted_folder(file.write(tmp_path / "mixed.gguf"), tmp_path / "cache", no_progress)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert kept_blocks.MOST_PLAIN_WEIGHTS == cpu_decoder.MAX_PLAIN_WEIGHTS


def test_what_is_written_is_what_is_read() -> None:
    assert (kept_blocks.VERSION, kept_blocks.METHOD) == (gguf_method.VERSION, "gguf-blocks")
