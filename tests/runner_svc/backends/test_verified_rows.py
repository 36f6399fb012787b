"""Rows of real models that verify drafts get the tokens and log-probabilities that they get without drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.execution.runner import Runner
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from runner_svc.weights.on_load import OnLoad
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.host_backend import no_progress
from tests.support.known_texts import KnownTexts, Most, Stream, copies, stream_all
from tests.support.parity import EXACT, FLOAT32, ROUNDED
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

MOST = 5
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "windows, soft caps": ("gemma2", {}),
    "deterministic": ("llama", {"deterministic": True}),
    "windows, deterministic": ("gemma2", {"deterministic": True}),
    "experts, deterministic": ("mixtral", {"deterministic": True}),
    "transformers, windows": ("mistral", {"decoder": "transformers"}),
    "transformers": ("llama", {"decoder": "transformers"}),
    "RoPE by length": ("llama-dynamic", {}),
    "RoPE by length, transformers": ("llama-dynamic", {"decoder": "transformers"}),
    "fp8": ("llama", {"on_load": OnLoad("fp8", head=True)}),
    "int4": ("qwen3", {"on_load": OnLoad("int4")}),
    "experts": ("mixtral", {}),
}


def load(kind: str, folder: Path, drafter: KnownTexts | None = None) -> TorchBackend:
    if "deterministic" in kind:
        skip_where_refused()
    family, options = KINDS[kind]
    if not folder.exists():
        make_tiny_model(family, folder)
    backend = TorchBackend.load(
        str(folder),
        cache_folder=folder / "unused",
        progress=no_progress,
        num_blocks=64,
        block_size=4,
        num_slots=4,
        max_step_tokens=128,
        drafter=drafter,
        max_drafts=MOST,
        **options,
    )
    backend.cache.data.fill_(torch.nan)  # so that reading an unwritten position shows
    return backend


def streams(dice: random.Random, temperature: float) -> list[Stream]:
    prompts = [[dice.randrange(NUM_TOKENS) for _ in range(dice.randint(1, 20))] for _ in range(4)]
    fields: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"frequency_penalty": 0.7, "min_tokens": 10, "stop_ids": [3, 5], "bias_ids": [3, 9], "bias_values": [9.0, 2.0]},
        {},
    ]
    return [
        Stream(prompt, dice.getrandbits(64), {"temperature": temperature, **own})
        for prompt, own in zip(prompts, fields, strict=True)
    ]


def assert_alike(plain: Stream, drafted: Stream, allowed_gap: float, allowed_error: float) -> int:
    """Fails if the streams part other than at a near tie; returns whether they part. Both are compared up to there."""
    for place, (mine, theirs) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)):
        spread = float(plain.logprobs[place][np.isfinite(plain.logprobs[place])].std())
        np.testing.assert_allclose(drafted.logprobs[place], plain.logprobs[place], rtol=0, atol=allowed_error * spread)
        if mine != theirs:
            scores = plain.scores(place)
            gap = float(scores[mine] - scores[theirs])
            print(f"near tie at place {place}: {theirs}, not {mine}, gap {gap:.6f}")
            assert gap < allowed_gap * spread
            return 1
    return 0


@pytest.mark.parametrize("kind", choice([*KINDS], in_ci=["windows, deterministic", "transformers, windows", "fp8"]))
def test_streams_equal_those_without_drafts(kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    folder = tmp_path / "model"
    plain_backend = load(kind, folder)
    options = KINDS[kind][1]
    rounded = "on_load" in options
    precision = ROUNDED if rounded else EXACT if options.get("deterministic") else FLOAT32
    drafter = KnownTexts(dice, NUM_TOKENS, wrong=0.2)
    backend = load(kind, folder, drafter)
    parted = tried = 0
    for turn in range(count(10, in_ci=1)):
        plain = streams(dice, temperature=[0.0, 0.8][turn % 2] if turn else dice.choice([0.0, 0.8]))
        stream_all(plain_backend, plain, 24, None)
        drafter.texts = {slot: stream.prompt + stream.tokens for slot, stream in enumerate(plain)}
        drafted = copies(plain)
        counts = stream_all(backend, drafted, 24, dice)
        assert counts.drafted > counts.accepted > 10
        for mine, theirs in zip(plain, drafted, strict=True):
            parted += assert_alike(mine, theirs, precision.gap, precision.error)
            tried += 1
    assert parted <= precision.few * max(1, tried // 20), f"{parted} of {tried} part"


def test_the_setting_has_the_latest_tokens_looked_up(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    settings = RunnerSettings.read(
        device="cpu",
        model=str(folder),
        draft="ngram",
        max_drafts=MOST,
        slots=4,
        kv_tokens=640,
        max_step_tokens=128,
    )
    backend = build_backend(settings, "cpu", no_progress)
    assert isinstance(backend, TorchBackend)
    hello = Runner(backend).hello()
    assert (hello.max_drafts, hello.drafter) == (MOST, "ngram")
    dice = random.Random(1)
    plain = [Stream(stream.prompt * 2, stream.seed) for stream in streams(dice, 0.0)]
    drafted = copies(plain)
    stream_all(backend, plain, 40, None)
    counts = stream_all(backend, drafted, 40, dice)
    assert counts.drafted > counts.accepted > 0
    assert sum(assert_alike(*pair, FLOAT32.gap, FLOAT32.error) for pair in zip(plain, drafted, strict=True)) <= 1


def test_only_positions_on_the_accepted_path_count_for_values_that_are_not_finite(tmp_path: Path) -> None:
    """A wrong draft may make any values; an accepted one ends its run, and the next run decides the status."""
    dice = random.Random(5)
    drafter = KnownTexts(dice, NUM_TOKENS, wrong=0.0)
    backend = load("llama", tmp_path / "model", drafter)
    (whole,) = plain = [Stream([1, 2, 3, 4, 5], 7, {"temperature": 1.0})]
    stream_all(backend, plain, 16, None)
    later = next(token for token in whole.tokens[4:] if token not in whole.prompt + whole.tokens[:4])
    unused = next(token for token in range(NUM_TOKENS) if token not in whole.prompt + whole.tokens)
    embeddings = backend._decoder.embeddings
    embeddings[torch.tensor([later, unused])] = torch.nan

    drafter._dice = Most()
    text = whole.prompt + whole.tokens
    drafter.texts = {0: [token if place % 4 else unused for place, token in enumerate(text)]}
    (got,) = drafted = copies(plain)
    counts = stream_all(backend, drafted, 16, Most())
    assert counts.drafted > counts.accepted > 0
    assert got.status == plan_pb2.ROW_STATUS_NOT_FINITE
    assert got.tokens == whole.tokens[: whole.tokens.index(later) + 1]
