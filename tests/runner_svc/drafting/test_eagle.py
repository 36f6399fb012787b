"""EAGLE's draft layer drafts what its own code drafts, from paged KV and states; its files are read whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from roster_common.setting_sources import UnusableSettings
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.drafting.eagle.checkpoint import Target, read_eagle
from runner_svc.execution.runner import Runner
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from runner_svc.tiers.thread_copier import ThreadCopier
from tests.support.eagle_layers import CONFIG, HIDDEN, cycle_layer, greedy_drafts, random_layer, save_layer
from tests.support.host_backend import no_progress
from tests.support.known_texts import Most, Stream, copies, stream_all
from tests.support.medusa_models import make_cycle_model
from tests.support.plans import plan
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

LAYERS = 8
"""Of the model: EAGLE-3 reads the inputs of layers 2, 4 and 5."""
TARGET = Target(HIDDEN, NUM_TOKENS, LAYERS)


def load(model: Path, layer: Path, **settings: Any) -> TorchBackend:
    read = RunnerSettings.read(
        device="cpu",
        model=str(model),
        draft=f"eagle:{layer}",
        slots=4,
        kv_tokens=640,
        block_size=4,
        max_step_tokens=128,
        **settings,
    )
    backend = build_backend(read, "cpu", no_progress)
    assert isinstance(backend, TorchBackend)
    backend.cache.data.fill_(torch.nan)
    return backend


def streams(dice: random.Random) -> list[Stream]:
    return [Stream([dice.randrange(NUM_TOKENS) for _ in range(dice.choice([1, 5, 12]))]) for _ in range(4)]


class Spied:
    """Remembers what a drafter proposed, and for which text."""

    def __init__(self, backend: TorchBackend) -> None:
        self.proposed: list[tuple[list[int], list[int]]] = []
        drafter: Any = backend.host_slots._drafter
        self._propose = drafter.propose
        drafter.propose = self

    def __call__(self, tokens: Any, slots: Any, counters: Any, most: Any) -> Any:
        made = self._propose(tokens, slots, counters, most)
        for slot, known, asked, line in zip(slots, counters, most, made, strict=True):
            self.proposed.append((tokens[slot, :known].tolist(), line[:asked].tolist()))
        return made


CASES = {
    "1": (False, {}),
    "1 with embeddings": (False, {}),
    "3": (True, {}),
    "3, other layers": (True, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}),
}


@pytest.mark.parametrize("case", choice([*CASES], in_ci=["1", "3, other layers"]))
def test_drafts_are_those_of_eagles_own_code(case: str, tmp_path: Path) -> None:
    """Whatever was drafted before, and in whatever chunks the prompt came."""
    torch.manual_seed(3)
    third, config = CASES[case]
    tensors = random_layer(third, own_embeddings="embeddings" in case)
    folder = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=LAYERS)
    backend = load(folder, save_layer(tmp_path / "layer", tensors, **config))
    assert Runner(backend).hello().drafter == f"eagle:{tmp_path}/layer"
    spied, dice = Spied(backend), random.Random(5)
    plain = streams(dice)
    drafted = copies(plain)
    stream_all(backend, plain, 9, None)
    counts = stream_all(backend, drafted, 9, dice)
    assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
    assert counts.drafted > 20
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    taps = {"3": (2, 4, 5), "3, other layers": (1, 3, 7)}.get(case, ())
    for text, proposed in spied.proposed[:: count(1, in_ci=3)]:
        expected = greedy_drafts(
            tensors,
            text,
            _states(model, text, taps),
            len(proposed),
            model.get_input_embeddings().weight.detach(),
            lambda states: states @ model.lm_head.weight.detach().T,
        )
        assert proposed == (expected if len(text) > 1 else [-1] * len(proposed))


@torch.inference_mode()
def _states(model: Any, text: list[int], taps: tuple[int, ...]) -> Tensor:
    hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[tap][0] for tap in taps], dim=1) if taps else hidden[-1][0]


def test_a_layer_that_is_right_is_always_accepted_with_transformers_too(tmp_path: Path) -> None:
    layer = save_layer(tmp_path / "layer", cycle_layer())
    backend = load(make_cycle_model(tmp_path / "model"), layer, decoder="transformers")
    dice = random.Random(4)
    for most in choice([dice, Most()], in_ci=[dice]):
        plain = streams(dice)
        drafted = copies(plain)
        stream_all(backend, plain, 11, None)
        counts = stream_all(backend, drafted, 11, most)
        assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
        assert counts.accepted == counts.drafted > 10


def test_states_and_kv_are_copied_with_blocks(tmp_path: Path) -> None:
    backend = load(make_cycle_model(tmp_path / "model"), save_layer(tmp_path / "layer", cycle_layer()))
    stream_all(backend, [Stream([1, 2, 3, 4, 5])], 4, None)
    drafter: Any = backend.host_slots._drafter
    states, keys = drafter._states.view(-1, 4, HIDDEN), drafter._layer.cache.view(2, -1, 4, 2, 16)
    backend.copy_blocks(np.array([1, 2], np.int32), np.array([2, 9], np.int32))
    assert torch.equal(states[2], states[1]) and not torch.equal(states[9], states[1])
    assert torch.equal(keys[:, 2], keys[:, 1]) and bool(states[9].any()) and bool(keys[0, 9].any())


def test_states_and_kv_travel_to_the_host_pool_and_back(tmp_path: Path) -> None:
    backend = load(make_cycle_model(tmp_path / "model"), save_layer(tmp_path / "layer", cycle_layer()))
    stream_all(backend, [Stream([1, 2, 3, 4, 5])], 4, None)
    drafter: Any = backend.host_slots._drafter
    states, keys = drafter._states.view(-1, 4, HIDDEN), drafter._layer.cache.view(2, -1, 4, 2, 16)
    kept = [each.clone() for each in (states[1], keys[:, 1], backend.cache.data[:, :, 1])]
    runner = Runner(backend, copier=ThreadCopier(backend.cache_regions, 5))
    runner.execute(1, plan(offloads=[[(1, 3, bytes(20))]]))
    for each in (states[1], keys[:, 1], backend.cache.data[:, :, 1]):
        each.fill_(torch.nan)
    runner.execute(2, plan(loads=[[(3, 9)]]))
    for was, now in zip(kept, (states[9], keys[:, 9], backend.cache.data[:, :, 9]), strict=True):
        assert torch.equal(was, now) and bool(was.any())


@pytest.mark.parametrize(
    ("third", "change", "sentence"),
    [
        (False, {"hidden_size": 128, "head_dim": 16}, "has 'hidden_size' 128, but the model's states have 64 elements"),
        (True, {"target_hidden_size": 128}, "has 'target_hidden_size' 128, but the model's states have 64 elements"),
        (False, {"vocab_size": 32000}, "has 'vocab_size' 32000, but the model's is 259: use a draft layer of this"),
        (False, {"num_hidden_layers": 2}, "has 2 layers, which is not supported in a draft layer."),
        (False, {"attention_bias": True}, "has biases in its layer, which is not supported in a draft layer."),
        (
            False,
            {"architectures": ["Qwen3ForCausalLM"]},
            "has the architectures ['Qwen3ForCausalLM'], but only Llama's",
        ),
        (False, {"parallel_drafting": True}, "parallel_drafting"),
        (False, {"bias": False}, "has a tensor 'fc.bias', which is not read for a draft layer."),
        (True, {"draft_vocab_size": 99}, "has a tensor 'd2t' of shape [100], but [99] is required."),
        (True, {"draft_vocab_size": 0.5}, "needs a 'draft_vocab_size' of 1 to 259, it has 0.5."),
        (True, {"eagle_config": {"use_aux_hidden_state": False}}, "'eagle_config' with 'use_aux_hidden_state', which"),
        (True, {"eagle_config": {"other": 1}}, "has an 'eagle_config' with 'other', which is not read."),
        (False, {"architectures": [["LlamaForCausalLM"]]}, "has the architectures [['LlamaForCausalLM']], but only"),
        (False, {"bias": "false"}, "needs true or false as 'bias', it has 'false'."),
        (True, {"norm_before_residual": "false"}, "needs true or false as 'norm_before_residual', it has 'false'."),
        (
            False,
            {"norm_before_residual": True},
            "has 'norm_before_residual' (True), but the tensors are those of EAGLE",
        ),
        (False, {"draft_vocab_size": 100}, "has 'draft_vocab_size' (100), but the tensors are those of EAGLE-1, which"),
        (False, {"eagle_config": {"use_aux_hidden_state": True}}, "has 'eagle_config' ({'use_aux_hidden_state': True}"),
        (
            True,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}},
            "three of the model's 8 layers in",
        ),
        (True, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}}, "three of the model's 8 layers in"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    third: bool, change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = save_layer(tmp_path / "layer", random_layer(third), **change)
    with pytest.raises(UnsupportedModel) as refusal:
        read_eagle(folder, TARGET)
    assert sentence in str(refusal.value)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = random_layer(True)
    twice = tensors["d2t"].clone()
    twice[1] -= 1 + int(twice[1]) - int(twice[0])
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"midlayer.mlp.down_proj.weight": torch.zeros(3, 3)}, "of shape [3, 3], but [64, 80] is required."),
        ({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int8)}, "'norm.weight' of type I8: convert it to BF16."),
        ({"lm_head.bias": torch.zeros(3)}, "has a tensor 'lm_head.bias', which is not read for a draft layer."),
        ({"d2t": tensors["d2t"] + 200}, "has a tensor 'd2t' that does not name ids of the model, each once."),
        ({"d2t": twice}, "has a tensor 'd2t' that does not name ids of the model, each once."),
        ({"t2d": ~tensors["t2d"]}, "has tensors 'd2t' and 't2d' that name different ids of the model."),
    ]
    for number, (change, sentence) in enumerate(cases):
        with pytest.raises(UnsupportedModel) as refusal:
            read_eagle(save_layer(tmp_path / f"layer{number}", tensors | change), TARGET)
        assert sentence in str(refusal.value)
    del tensors["norm.weight"]
    with pytest.raises(UnsupportedModel, match=r"has no tensor 'norm\.weight', which its config\.json requires"):
        read_eagle(save_layer(tmp_path / "lacking", tensors), TARGET)
    (tmp_path / "lacking" / "model.safetensors").rename(tmp_path / "lacking" / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin is a pickle file, which could run code when loaded"):
        read_eagle(tmp_path / "lacking", TARGET)
    with pytest.raises(
        ModelNotFound, match=r"no folder .*/none with a draft layer: set draft to 'eagle:' and a folder"
    ):
        read_eagle(tmp_path / "none", TARGET)


def test_eagle_3_needs_the_own_decoder(tmp_path: Path) -> None:
    layer = save_layer(
        tmp_path / "layer", random_layer(True), eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    )
    with pytest.raises(UnusableSettings, match="a layer of EAGLE-3, which reads states within the model, but transf"):
        load(make_tiny_model("llama", tmp_path / "model"), layer, decoder="transformers")
    assert CONFIG["num_hidden_layers"] == 1
