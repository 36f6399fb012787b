"""The GPU backend with EAGLE's layer, on the CPU: it drafts what EAGLE's own code drafts, and changes no stream."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.eagle_backend import EagleDraftingCudaBackend
from tests.support.drafters import Prophet
from tests.support.eagle_layers import HIDDEN, cycle_layer, greedy_drafts, random_layer, save_layer
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.known_texts import Stream, copies, stream_all
from tests.support.medusa_models import make_cycle_model
from tests.support.model_drafting import ModelDraftingDriver
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

SIZES: dict[str, Any] = {"num_slots": 5, "block_size": 8, "max_step_tokens": 160, "num_blocks": 60}


def backend(model: Path, layer: Path, device: HostDevice | None = None) -> EagleDraftingCudaBackend:
    made = host_backend(model, eagle=layer, drafts=DraftOptions(f"eagle:{layer}", 5), device=device, **SIZES)
    assert isinstance(made, EagleDraftingCudaBackend)
    eagle = made._steps.draft
    for kept in (made.cache.data, eagle._states, eagle.cache.data):
        kept.fill_(torch.nan)
    return made


def streams(dice: random.Random) -> list[Stream]:
    return [Stream([dice.randrange(NUM_TOKENS) for _ in range(dice.choice([1, 5, 12]))]) for _ in range(4)]


TAPS = {"1": (), "1 with embeddings": (), "3": (2, 4, 5), "3, with the output": (1, 2, 3)}


@pytest.mark.parametrize("case", choice([*TAPS], in_ci=["1 with embeddings", "3, with the output"]))
def test_drafts_are_those_of_eagles_own_code(case: str, tmp_path: Path) -> None:
    """Whatever was drafted before, and in whatever chunks the prompt came."""
    torch.manual_seed(3)
    tensors = random_layer(case.startswith("3"), own_embeddings="embeddings" in case)
    folder = make_tiny_model("llama", tmp_path / "model", **({"num_hidden_layers": 8} if case == "3" else {}))
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}} if "output" in case else {}
    made = backend(folder, save_layer(tmp_path / "layer", tensors, **config))
    eagle, seen = made._steps.draft, []
    propose = eagle.propose

    def spied(stream: int, rows: Any, prompt_lens: torch.Tensor, proposals: torch.Tensor, plan: int) -> None:
        propose(stream, rows, prompt_lens, proposals, plan)
        for slot, asked, line in zip(rows.slots.tolist(), rows.counts.tolist(), proposals.tolist(), strict=True):
            known = int(made._slots.counters[slot])
            seen.append((made._slots.tokens[slot, :known].tolist(), line[: max(0, asked - 1)]))

    eagle.propose = spied  # type: ignore[method-assign]
    dice = random.Random(5)
    plain = streams(dice)
    drafted = copies(plain)
    stream_all(made, plain, 7, None)  # type: ignore[arg-type]
    counts = stream_all(made, drafted, 7, dice)  # type: ignore[arg-type]
    assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
    assert counts.drafted > 15
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embeddings, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    for text, proposed in [each for each in seen if each[1]][:: count(1, in_ci=2)]:
        states = _states(model, text, TAPS[case])
        expected = greedy_drafts(tensors, text, states, len(proposed), embeddings, lambda each: each @ head.T)
        assert proposed == (expected if len(text) > 1 else [-1] * len(proposed))


@torch.inference_mode()
def _states(model: Any, text: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    last = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]
    if not taps:
        return hidden[-1][0]
    return torch.cat([(last if tap == len(model.model.layers) else hidden[tap])[0] for tap in taps], dim=1)


@pytest.mark.parametrize("run", range(count(10, in_ci=1)))
def test_random_plans_change_no_stream(run: int, tmp_path: Path) -> None:
    """A layer that is right has its drafts accepted; a random one changes nothing."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    torch.manual_seed(seed)
    folder = make_tiny_model(dice.choice(["llama", "gemma2"]), tmp_path / "model")
    third = dice.random() < 0.5
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}} if third else {}
    layer = save_layer(tmp_path / "layer", random_layer(third), **config)
    made = backend(folder, layer, HostDevice(mixed_graphs=dice.random() < 0.5))
    requests = count(8, in_ci=3)
    driver = ModelDraftingDriver(made, host_backend(folder, **SIZES), Prophet(dice, NUM_TOKENS, 0.0), dice, requests)
    driver.run()
    assert driver.drafted > 5 or requests < 8, "a few short requests may draft nothing"


def test_a_layer_that_is_right_is_always_accepted(tmp_path: Path) -> None:
    made = backend(make_cycle_model(tmp_path / "model"), save_layer(tmp_path / "layer", cycle_layer()))
    dice = random.Random(4)
    plain = streams(dice)
    drafted = copies(plain)
    stream_all(made, plain, 8, None)  # type: ignore[arg-type]
    counts = stream_all(made, drafted, 8, dice)  # type: ignore[arg-type]
    assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
    assert counts.accepted == counts.drafted > 5
    eagle = made._steps.draft
    made.copy_blocks(np.array([1], np.int32), np.array([50], np.int32))
    states, keys = eagle._states.view(-1, 8, HIDDEN), eagle._layer.cache.view(2, -1, 8, 2, 16)
    torch.testing.assert_close(states[50], states[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(keys[:, 50], keys[:, 1], rtol=0, atol=0, equal_nan=True)
