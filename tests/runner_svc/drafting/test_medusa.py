"""Medusa's heads: heads that are right are always accepted, wrong ones change nothing, and files are read whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roster_common.setting_sources import UnusableSettings
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.drafting.medusa.checkpoint import HEADS_FILE, read_heads
from runner_svc.drafting.medusa.heads import logits_of
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import SlotChanges
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.host_backend import no_progress
from tests.support.known_texts import Most, Stream, copies, stream_all
from tests.support.medusa_models import (
    HIDDEN,
    cycle_heads,
    make_constant_model,
    make_cycle_model,
    random_heads,
    save_heads,
    zero_heads,
)
from tests.support.parity import FLOAT32
from tests.support.thoroughness import choice
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model


def load(model: Path, heads: Path, **settings: Any) -> TorchBackend:
    read = RunnerSettings.read(
        device="cpu",
        model=str(model),
        draft=f"medusa:{heads}",
        slots=4,
        kv_tokens=640,
        block_size=4,
        max_step_tokens=128,
        **settings,
    )
    backend = build_backend(read, "cpu", no_progress)
    assert isinstance(backend, TorchBackend)
    return backend


def streams(dice: random.Random, **sampling: Any) -> list[Stream]:
    prompts = [[dice.randrange(NUM_TOKENS) for _ in range(dice.randint(1, 9))] for _ in range(4)]
    return [Stream(prompt, dice.getrandbits(64), sampling) for prompt in prompts]


KINDS = [(True, "roster"), (True, "transformers"), (False, "roster"), (False, "transformers")]


@pytest.mark.parametrize(("own_outputs", "decoder"), choice(KINDS, in_ci=KINDS[1:2]))
def test_heads_that_are_right_are_always_accepted(own_outputs: bool, decoder: str, tmp_path: Path) -> None:
    """From the first step behind the prompt on, whatever number of tokens each row drafts."""
    heads = save_heads(tmp_path / "heads", cycle_heads(4, own_outputs=own_outputs))
    backend = load(make_cycle_model(tmp_path / "model"), heads, decoder=decoder)
    hello = Runner(backend).hello()
    assert (hello.drafter, hello.max_drafts) == (f"medusa:{heads}", 4)  # not 7: there are 4 heads
    dice = random.Random(4)
    for temperature, most in ((0.0, Most()), (1.0, dice)):
        plain = streams(dice, temperature=temperature)
        drafted = copies(plain)
        stream_all(backend, plain, 21, None)
        counts = stream_all(backend, drafted, 21, most)
        assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
        assert counts.accepted == counts.drafted > 0
        if temperature == 0.0:
            assert counts.drafted == 4 * 16  # a token of the prompt's step, then 5 in each of four


def test_drafts_are_drawn_with_the_parameters_and_the_noise_of_their_positions(tmp_path: Path) -> None:
    """The model's logits are the same everywhere, so that the heads know them: then every draft is the draw."""
    heads = save_heads(tmp_path / "heads", zero_heads(3))
    backend = load(make_constant_model(tmp_path / "model"), heads)
    dice = random.Random(6)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.2, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 1.0},
        {"frequency_penalty": 9.0, "min_tokens": 9, "stop_ids": [3, 5], "bias_ids": [3, 9], "bias_values": [9.0, 2.0]},
    ]
    for sampling in choice(samplings, in_ci=samplings[:2]):
        plain = streams(dice, **sampling)
        drafted = copies(plain)
        stream_all(backend, plain, 18, None)
        counts = stream_all(backend, drafted, 18, dice)
        assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
        assert counts.accepted == counts.drafted > 10
        assert len(set(plain[0].tokens)) > 8


WRONG = [(family, deterministic) for family in ("gemma2", "mixtral", "gpt2") for deterministic in (False, True)]


@pytest.mark.parametrize(("family", "deterministic"), choice(WRONG, in_ci=[("gemma2", True)]))
def test_heads_that_are_wrong_change_nothing(family: str, deterministic: bool, tmp_path: Path) -> None:
    if deterministic:
        skip_where_refused()
    torch.manual_seed(1)
    folder = make_tiny_model(family, tmp_path / "model")
    backend = load(folder, save_heads(tmp_path / "heads", random_heads(5, 2)), deterministic=deterministic)
    backend.cache.data.fill_(torch.nan)
    dice = random.Random(2)
    plain = streams(dice, temperature=0.0)
    drafted = copies(plain)
    stream_all(backend, plain, 16, None)
    counts = stream_all(backend, drafted, 16, dice)
    assert counts.drafted > 20 > counts.accepted
    for mine, theirs in zip(plain, drafted, strict=True):
        parts = [place for place, pair in enumerate(zip(mine.tokens, theirs.tokens, strict=True)) if len(set(pair)) > 1]
        if deterministic:
            assert not parts and np.array_equal(mine.logprobs, theirs.logprobs)
        elif parts:  # a near tie
            scores = mine.scores(parts[0])
            assert abs(scores[mine.tokens[parts[0]]] - scores[theirs.tokens[parts[0]]]) < FLOAT32.gap * scores.std()


def test_a_row_whose_state_is_not_known_drafts_nothing(tmp_path: Path) -> None:
    backend = load(make_cycle_model(tmp_path / "model"), save_heads(tmp_path / "h", cycle_heads(2, own_outputs=True)))
    drafter = backend.host_slots.observer
    assert drafter is not None
    stream_all(backend, [Stream([5])], 4, None)
    tokens, slots, most = backend.host_slots.tokens, np.zeros(1, np.int32), np.full(1, 2, np.int32)
    known = backend.host_slots.known[:1]

    def proposed(counter: int) -> list[list[int]]:
        return drafter.propose(tokens, slots, np.array([counter], np.int32), most).tolist()

    assert known == 5 and proposed(5) == [[10, 11]]
    assert proposed(6) == proposed(4) == [[-1, -1]]  # tokens came or went that no step drew
    Runner(backend).reset()
    stream_all(backend, [Stream([1, 2, 3, 4])], 1, None)
    assert backend.host_slots.known[0] == 5 and proposed(5) == [[6, 7]]
    admitted = backend.host_slots.admitted[0]
    none = np.zeros(0, np.int32)
    backend.change_slots(SlotChanges([admitted], none, none, none))
    assert proposed(5) == [[-1, -1]]  # another sequence with as many tokens


def test_the_layout_of_public_checkpoints_is_read(tmp_path: Path) -> None:
    torch.manual_seed(2)
    tensors = random_heads(3, 2)
    kept = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    folder = save_heads(tmp_path / "heads", kept, decoding_strategy="tree_decoding", hidden_size=HIDDEN)
    states = torch.randn(2, HIDDEN)
    found = logits_of(read_heads(folder, HIDDEN, NUM_TOKENS), states, lambda x: x)
    for number, logits in enumerate(found):
        x = states
        for block in range(2):
            weight, bias = (kept[f"{number}.{block}.linear.{part}"].float() for part in ("weight", "bias"))
            z = x @ weight.T + bias
            x = x + z * torch.sigmoid(z)
        expected = x @ kept[f"{number}.2.weight"].float().T
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"medusa_num_heads": None}, "needs an integer 'medusa_num_heads' of 1 to 15, it has None."),
        ({"medusa_num_heads": 16}, "'medusa_num_heads' of 1 to 15, it has 16."),
        ({"medusa_num_heads": 4}, "has no tensor '3.0.linear.weight', which its config.json requires."),
        ({"medusa_num_layers": 2}, "has no tensor '0.1.linear.weight', which"),
        ({"hidden_size": 4096}, "has 'hidden_size' 4096, but the model's is 64: use heads of this model."),
        ({"vocab_size": 32000}, "has 'vocab_size' 32000, but the model's is 259: use heads of this model."),
        ({"medusa_heads_type": "lora"}, "has 'medusa_heads_type' ('lora'), which is not read for Medusa heads"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = save_heads(tmp_path / "heads", cycle_heads(3, own_outputs=True), **change)
    with pytest.raises(UnsupportedModel) as refusal:
        read_heads(folder, HIDDEN, NUM_TOKENS)
    assert sentence in str(refusal.value)


TWO, SIZE = {"medusa_num_heads": 2, "medusa_num_layers": 1}, (HIDDEN, NUM_TOKENS)


def test_all_heads_of_a_file_are_read(tmp_path: Path) -> None:
    """The first public files have 5 beside a config.json that says 2."""
    assert len(read_heads(save_heads(tmp_path / "a", random_heads(5, 1), **TWO), *SIZE)) == 5
    tensors = random_heads(5, 1)
    with pytest.raises(UnsupportedModel, match=r"has a tensor '40\.0\.linear\.bias', which its config\.json does not"):
        read_heads(save_heads(tmp_path / "b", tensors | {"40.0.linear.bias": torch.zeros(HIDDEN)}, **TWO), *SIZE)
    del tensors["3.0.linear.bias"]
    with pytest.raises(UnsupportedModel, match=r"has no tensor '3\.0\.linear\.bias'"):
        read_heads(save_heads(tmp_path / "c", tensors, **TWO), *SIZE)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = cycle_heads(2, own_outputs=True)
    extra = {"1.0.norm.weight": torch.ones(HIDDEN)}
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"0.0.linear.bias": torch.zeros(3)}, "'0.0.linear.bias' of shape [3], but the model requires [64]: use heads"),
        ({"1.1.weight": torch.zeros(32000, HIDDEN)}, "'1.1.weight' of shape [32000, 64], but the model requires [259,"),
        ({"1.1.weight": torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.int8)}, "of type I8: convert it to float32"),
        (extra, "has a tensor '1.0.norm.weight', which its config.json does not explain."),
    ]
    for number, (change, sentence) in enumerate(cases):
        folder = save_heads(tmp_path / f"heads{number}", tensors | change)
        with pytest.raises(UnsupportedModel) as refusal:
            read_heads(folder, HIDDEN, NUM_TOKENS)
        assert sentence in str(refusal.value)
    folder = save_heads(tmp_path / "lacking", {name: t for name, t in tensors.items() if name != "1.1.weight"})
    with pytest.raises(UnsupportedModel, match=r"has no tensor '1\.1\.weight'"):
        read_heads(folder, HIDDEN, NUM_TOKENS)


def test_missing_and_pickled_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFound, match=r"no folder .*/none with Medusa heads: set draft to 'medusa:' and a folder"
    ):
        read_heads(tmp_path / "none", HIDDEN, NUM_TOKENS)
    folder = save_heads(tmp_path / "heads", cycle_heads(2, own_outputs=False))
    whole = (folder / HEADS_FILE).read_bytes()
    (folder / HEADS_FILE).write_bytes(whole[:-4])
    with pytest.raises(UnsupportedModel, match="is cut off"):
        read_heads(folder, HIDDEN, NUM_TOKENS)
    (folder / HEADS_FILE).unlink()
    with pytest.raises(ModelNotFound, match=r"has no medusa_lm_head.safetensors\.$"):
        read_heads(folder, HIDDEN, NUM_TOKENS)
    tensors = {"0.0.linear.bias": torch.arange(3.0)}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    with pytest.raises(
        ModelNotFound, match="is a pickle file, which could run code when loaded; convert it"
    ) as refusal:
        read_heads(folder, HIDDEN, NUM_TOKENS)
    conversion = str(refusal.value).split('"')[1]
    code = f"import torch\nfrom safetensors.torch import save_file\nimport os\nos.chdir({str(folder)!r})\n{conversion}"
    exec(code, {})
    assert (folder / HEADS_FILE).exists()
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(UnsupportedModel, match="has to be an object"):
        read_heads(folder, HIDDEN, NUM_TOKENS)


def test_heads_of_another_model_are_refused_at_start(tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads", cycle_heads(2, own_outputs=False))
    folder = make_tiny_model("llama-head-dim", tmp_path / "model")
    with pytest.raises(
        UnusableSettings, match=r"draft is 'medusa:.*' of shape \[64, 64\], but the model requires \[48"
    ):
        load(folder, heads)
