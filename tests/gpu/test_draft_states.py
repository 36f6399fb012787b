"""Medusa's heads and EAGLE's layer on a GPU: right ones are accepted, wrong ones change no stream."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.execution.runner import Runner
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.eagle_backend import EagleDraftingCudaBackend
from runner_svc.gpu.drafts.medusa_backend import MedusaDraftingCudaBackend
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from runner_svc.startup.step_costs import measured_step_costs
from tests.gpu.test_drafts import Drafted, near_ties
from tests.support.eagle_layers import cycle_layer, random_layer, save_layer
from tests.support.gpu_backends import load  # imports CuPy
from tests.support.host_backend import host_backend, no_progress
from tests.support.known_texts import Most, Stream, copies, stream_all
from tests.support.medusa_models import (
    cycle_heads,
    make_constant_model,
    make_cycle_model,
    random_heads,
    save_heads,
    zero_heads,
)

HIDDEN = 256
SLOTS: dict[str, Any] = {"num_slots": 8}
HOST: dict[str, Any] = {"num_slots": 8, "block_size": 16, "max_step_tokens": 128, "num_blocks": 200}


def drafting(folder: Path, kind: str, path: Path, most: int = 7) -> Any:
    """Returns a backend whose drafts heads or a layer draw."""
    backend = load(folder, drafts=DraftOptions(f"{kind}:{path}", most), **SLOTS, **{kind: path})
    assert isinstance(backend, MedusaDraftingCudaBackend if kind == "medusa" else EagleDraftingCudaBackend)
    if kind == "eagle":
        for kept in (backend._steps.draft._states, backend._steps.draft.cache.data):
            kept.fill_(torch.nan)
    return backend


def saved(kind: str, right: bool, folder: Path) -> Path:
    if kind == "eagle-3":
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        return save_layer(folder, random_layer(True, hidden=HIDDEN), hidden_size=HIDDEN, eagle_config=ids)
    if kind == "eagle":
        layer = cycle_layer(HIDDEN) if right else random_layer(False, hidden=HIDDEN)
        return save_layer(folder, layer, hidden_size=HIDDEN)
    heads = cycle_heads(4, own_outputs=False, hidden=HIDDEN) if right else random_heads(5, 2, HIDDEN)
    return save_heads(folder, heads)


def streams(dice: random.Random, **sampling: Any) -> list[Stream]:
    prompts = [[dice.randrange(HIDDEN) for _ in range(dice.randint(2, 9))] for _ in range(4)]
    return [Stream(prompt, dice.getrandbits(64), sampling) for prompt in prompts]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_what_is_right_is_always_accepted(kind: str, tmp_path: Path) -> None:
    folder = make_cycle_model(tmp_path / "model", hidden=HIDDEN)
    backend = drafting(folder, kind, saved(kind, True, tmp_path / "drafts"))
    dice = random.Random(4)
    for most in (Most(), dice):
        plain = streams(dice, temperature=0.0)
        drafted = copies(plain)
        stream_all(backend, plain, 21, None)
        counts = stream_all(backend, drafted, 21, most)
        print(f"{kind}: {counts.drafted} drafted, {counts.accepted} accepted")
        assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
        assert counts.accepted == counts.drafted > 20


def test_drafts_are_drawn_with_the_parameters_and_the_noise_of_their_positions(tmp_path: Path) -> None:
    """The model's logits are the same everywhere, so that the heads know them, up to the products' rounding."""
    folder = make_constant_model(tmp_path / "model", HIDDEN)
    backend = drafting(folder, "medusa", save_heads(tmp_path / "heads", zero_heads(3, HIDDEN)))
    dice = random.Random(6)
    for sampling in (
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.2, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"frequency_penalty": 9.0, "min_tokens": 9, "stop_ids": [3, 5], "bias_ids": [3, 9], "bias_values": [9.0, 2.0]},
    ):
        drafted = streams(dice, **sampling)
        counts = stream_all(backend, drafted, 18, dice)
        print(f"{sampling}: {counts.drafted} drafted, {counts.accepted} accepted")
        assert counts.accepted >= 0.9 * counts.drafted > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle-3"])
def test_streams_are_those_without_drafts_up_to_near_ties(kind: str, temperature: float, tmp_path: Path) -> None:
    """Two plans in flight, random numbers of drafts, which are mostly wrong."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    folder = make_tiny_model("llama", tmp_path / "tiny", 7, torch.bfloat16, hidden_size=HIDDEN)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 15))] for _ in range(8)]
    plain = Drafted(load(folder, **SLOTS), prompts, temperature)
    plain.run(rng, 0)
    path = saved(kind, False, tmp_path / "drafts")
    drafted = Drafted(drafting(folder, kind.removesuffix("-3"), path), prompts, temperature)
    drafted.run(rng, 5)
    ties = near_ties(drafted, plain, temperature)
    print(f"{kind}, {temperature}: ties {ties} of 8, {drafted.drafted} drafted, {drafted.accepted} accepted")
    assert ties <= 4 and drafted.drafted > 60


@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_a_layer_mostly_drafts_what_it_drafts_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """A GPU rounds to bfloat16."""
    torch.manual_seed(5)
    folder = make_tiny_model("llama", tmp_path / "tiny", 7, torch.bfloat16, hidden_size=HIDDEN)
    path = saved(kind, False, tmp_path / "drafts")
    texts: dict[str, list[list[int]]] = {}
    for name, backend in (
        ("gpu", drafting(folder, "eagle", path, 3)),
        ("cpu", host_backend(folder, eagle=path, drafts=DraftOptions("", 3), **HOST)),
    ):
        known = texts.setdefault(name, [])
        steps = backend._steps  # type: ignore[attr-defined]
        launch, verify = backend.verify_graphs.launch, backend.verify_graphs  # type: ignore[attr-defined]

        def spied(shape: Any, known: Any = known, steps: Any = steps, launch: Any = launch) -> None:
            launch(shape)
            if shape.stride > 1:
                known += steps._proposals[: shape.rows * (shape.stride - 1)].view(shape.rows, -1)[:4].tolist()

        verify.launch = spied
        stream_all(backend, streams(random.Random(4), temperature=0.0), 16, Most())  # type: ignore[arg-type]
    pairs = [
        (a, b) for one, other in zip(texts["gpu"], texts["cpu"], strict=False) for a, b in zip(one, other, strict=True)
    ]
    equal = sum(a == b for a, b in pairs)
    print(f"{kind}: {equal} of {len(pairs)} drafts are those of a CPU")
    assert len(pairs) > 60 and equal > 0.4 * len(pairs)  # texts may part at near ties


@pytest.mark.parametrize("kind", ["medusa", "eagle", "model"])
def test_a_runner_starts_with_it(kind: str, tmp_path: Path) -> None:
    """By the settings, with steps that are timed as at any start."""
    folder = make_cycle_model(tmp_path / "model", hidden=HIDDEN)
    path = folder if kind == "model" else saved(kind, True, tmp_path / "drafts")
    sizes = {"slots": 8, "max_step_tokens": 128, "context_length": 256, "kv_tokens": 4096, "cache_dir": tmp_path}
    settings = RunnerSettings.read(device="cuda", model=str(folder), draft=f"{kind}:{path}", max_drafts=5, **sizes)
    runner = Runner(build_backend(settings, "cuda", no_progress))
    hello = runner.hello()
    assert (hello.drafter, hello.max_drafts) == (f"{kind}:{path}", 4 if kind == "medusa" else 5)
    costs = measured_step_costs(runner, on_gpu=True)
    print(f"{kind}: {[(cost.decode_rows, cost.drafts, round(cost.step_ns / 1e6, 2)) for cost in costs]}")
    assert any(cost.drafts for cost in costs)
