"""The GPU backend with Medusa's heads, on the CPU: right heads are always accepted, wrong ones change nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from runner_svc.execution.runner import Runner
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.medusa_backend import MedusaDraftingCudaBackend
from tests.support.drafters import Prophet
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.known_texts import Most, Stream, copies, stream_all
from tests.support.medusa_models import (
    cycle_heads,
    make_constant_model,
    make_cycle_model,
    random_heads,
    save_heads,
    zero_heads,
)
from tests.support.model_drafting import ModelDraftingDriver
from tests.support.plans import admission, plan
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

SIZES: dict[str, Any] = {"num_slots": 5, "block_size": 8, "max_step_tokens": 160, "num_blocks": 60}


def backend(model: Path, heads: Path, most: int = 7, device: HostDevice | None = None) -> MedusaDraftingCudaBackend:
    made = host_backend(model, medusa=heads, drafts=DraftOptions(f"medusa:{heads}", most), device=device, **SIZES)
    assert isinstance(made, MedusaDraftingCudaBackend)
    made.cache.data.fill_(torch.nan)
    return made


def streams(dice: random.Random, **sampling: Any) -> list[Stream]:
    prompts = [[dice.randrange(NUM_TOKENS) for _ in range(dice.randint(1, 9))] for _ in range(4)]
    return [Stream(prompt, dice.getrandbits(64), sampling) for prompt in prompts]


@pytest.mark.parametrize("own_outputs", choice([True, False], in_ci=[False]))
def test_heads_that_are_right_are_always_accepted(own_outputs: bool, tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads", cycle_heads(4, own_outputs=own_outputs))
    made = backend(make_cycle_model(tmp_path / "model"), heads)
    assert (Runner(made).hello().drafter, made.max_drafts) == (f"medusa:{heads}", 4)  # not 7: there are 4 heads
    dice = random.Random(4)
    plain = streams(dice, temperature=0.0)
    drafted = copies(plain)
    stream_all(made, plain, 11, None)  # type: ignore[arg-type]
    counts = stream_all(made, drafted, 11, Most())  # type: ignore[arg-type]
    assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
    assert counts.accepted == counts.drafted >= 4 * 7  # a token of the prompt's step, then 5 in each of two


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.2, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"frequency_penalty": 9.0, "min_tokens": 9, "stop_ids": [3, 5], "bias_ids": [3, 9], "bias_values": [9.0, 2.0]},
    {"temperature": 1.0},
]


def test_drafts_are_drawn_with_the_parameters_and_the_noise_of_their_positions(tmp_path: Path) -> None:
    """The model's logits are the same everywhere, so that the heads know them: then every draft is the draw."""
    made = backend(make_constant_model(tmp_path / "model"), save_heads(tmp_path / "heads", zero_heads(3)))
    dice = random.Random(6)
    for sampling in choice(SAMPLINGS, in_ci=SAMPLINGS[:2]):
        plain = streams(dice, **sampling)
        drafted = copies(plain)
        stream_all(made, plain, 13, None)  # type: ignore[arg-type]
        counts = stream_all(made, drafted, 13, dice)  # type: ignore[arg-type]
        assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
        assert counts.accepted == counts.drafted > 10
        assert len(set(plain[0].tokens)) > 8


@pytest.mark.parametrize("run", range(count(10, in_ci=1)))
def test_heads_that_are_wrong_change_nothing(run: int, tmp_path: Path) -> None:
    """Random plans, several of them in flight."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    torch.manual_seed(seed)
    folder = make_tiny_model(dice.choice(["llama", "gemma2"]), tmp_path / "model")
    heads = random_heads(5, 2) if dice.random() < 0.5 else zero_heads(3)
    made = backend(folder, save_heads(tmp_path / "heads", heads), device=HostDevice(mixed_graphs=dice.random() < 0.5))
    plain = host_backend(folder, **SIZES)
    requests = count(8, in_ci=3)
    driver = ModelDraftingDriver(made, plain, Prophet(dice, NUM_TOKENS, 0.0), dice, requests)
    driver.run()
    assert driver.drafted > 5 or requests < 8, "a few short requests may draft nothing"


def test_another_sequence_in_a_slot_begins_without_a_state(tmp_path: Path) -> None:
    made = backend(make_cycle_model(tmp_path / "m"), save_heads(tmp_path / "h", cycle_heads(2, own_outputs=True)))
    stream_all(made, [Stream([5])], 4, None)  # type: ignore[arg-type]
    drafter = made._steps.medusa
    assert drafter._counters[0] == 5 == made._slots.counters[0]
    runner = Runner(made)
    runner.reset()
    newcomer = admission(0, [1, 2, 3, 4, 6], [7, 8])
    runner.execute(1, plan(admissions=[newcomer], extents=[(0, 0, 2, 0)]))
    assert drafter._counters[0] == -1 and made._slots.counters[0] == 5
