"""Quantized checkpoints give the greedy tokens of transformers' model with the numbers that they hold."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder import cpu_decoder
from runner_svc.gpu.backend import CudaBackend
from runner_svc.model.checkpoint.servable import why_not
from runner_svc.model.errors import UnsupportedModel
from runner_svc.weights import cpu_products
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend, no_progress
from tests.support.parity import FLOAT32, ROUNDED, Parity
from tests.support.thoroughness import choice
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model
from tests.support.tiny_quantized import KINDS, make_tiny_quantized

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "olmo2", "glm", "cohere", "granite")
INTERLEAVED = ("cohere", "glm")
"""Their rows of queries and keys are moved, and those of blocks can't be."""
IN_CI = ("compressed-fp8-token", "auto-fp8-static", "gptq-reordered")
MAX_TOKENS = 10


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path, on_load: OnLoad = NOTHING) -> TorchBackend:
    sizes: dict[str, Any] = {"num_blocks": 80, "block_size": 8, "num_slots": 4, "max_step_tokens": 128}
    return TorchBackend.load(
        str(folder), cache_folder=folder / "unused", progress=no_progress, on_load=on_load, **sizes
    )


def load_host(folder: Path) -> CudaBackend:
    """Returns the GPU's backend with kernels in torch: its decoder over formats that have no kernels yet."""
    return host_backend(folder, num_blocks=40, block_size=16, num_slots=4, max_step_tokens=128)


@pytest.mark.parametrize("backend", ["cpu", "host"])
@pytest.mark.parametrize("kind", choice(list(KINDS), in_ci=IN_CI))
def test_greedy_tokens(kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    family = rng.choice([name for name in FAMILIES if "block" not in kind or name not in INTERLEAVED])
    print(f"seed {seed}, {family}")
    if rng.random() < 0.5:
        monkeypatch.setattr(cpu_decoder, "MAX_PLAIN_WEIGHTS", 0)
        monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: False)  # whose errors grow in tiny models
    sizes = KERNEL_SIZES[family] if backend == "host" else {}
    folder, model = make_tiny_quantized(kind, family, tmp_path, seed, **sizes)
    is_rounded = "fp8" in kind or kind in ("fbgemm", "modelopt") or cpu_decoder.MAX_PLAIN_WEIGHTS == 0
    precision = ROUNDED if is_rounded else FLOAT32
    parity = Parity(model, precision)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    loaded = load(folder) if backend == "cpu" else load_host(folder)
    streams = RandomDriver(loaded, rng).generate(prompts, MAX_TOKENS, 20)
    parity.check(prompts, streams, MAX_TOKENS)
    parity.assert_few_ties()


def test_norms_with_a_row_for_each_head_are_plain(tmp_path: Path) -> None:
    folder, _ = make_tiny_quantized("gptq", "cohere-qk-norm", tmp_path, num_hidden_layers=1)
    assert why_not(folder) is None


def test_moved_rows_of_blocks_are_refused(tmp_path: Path) -> None:
    folder, _ = make_tiny_quantized("fp8-blocks", "cohere", tmp_path)
    with pytest.raises(UnsupportedModel, match="can't be read: rows of a matrix in FP8 in blocks of 128 x 128"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("gptq", {"desc_act": True, "group_size": 64}, "'model.layers.0.self_attn.q_proj.qzeros' is"),
        ("packed", {"ignore": ["lm_head"]}, "no tensor 'model.layers.1.mlp.down_proj.weight_packed'"),
        ("compressed-fp8-token", {"ignore": []}, "'lm_head.weight' has dtype"),
        (
            "compressed-fp8-token",
            {"ignore": ["re:.*"]},
            "F16, BF16, as its config.json does not say that it is quantized",
        ),
        (
            "compressed-fp8-token",
            {"ignore": ["lm_head", "re:.*mlp"]},
            "'model.layers.0.mlp.gate_proj.weight' has dtype",
        ),
        ("compressed-fp8-static", {"ignore": ["re:("]}, "broken pattern"),
        ("fp8-blocks", {"weight_block_size": None}, "no tensor 'model.layers.0.self_attn.q_proj.weight_scale'"),
        ("awq", {"modules_to_not_convert": ["self_attn.q_proj"]}, "no tensor 'model.layers.0.self_attn.q_proj.weight'"),
    ],
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(
    kind: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_quantized(kind, "llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    assert (told := why_not(folder)) is not None and re.search(named, told)


def test_tensors_decide_where_programs_read_names_otherwise(tmp_path: Path) -> None:
    """AutoAWQ and vLLM find a name anywhere in a module's, transformers at its beginning or end."""
    folder, _ = make_tiny_quantized("awq", "llama", tmp_path, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn", "mlp.gate"]  # gate_proj is quantized
    (folder / "config.json").write_text(json.dumps(config))
    assert why_not(folder) is None
    tensors = load_file(folder / "model.safetensors")
    rows, columns = 64, 64
    for name in [name for name in tensors if "q_proj" in name]:
        del tensors[name]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(rows, columns)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert why_not(folder) is None


def test_a_quantized_checkpoint_whose_config_does_not_say_so(tmp_path: Path) -> None:
    folder, _ = make_tiny_quantized("gptq", "llama", tmp_path, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    told = why_not(folder)
    assert told is not None and re.search(r"it has \S+q_proj\.qweight: .* by 'quantization_config'", told)


def test_biases_of_gptq_that_the_model_lacks_must_be_zero(tmp_path: Path) -> None:
    """AutoGPTQ wrote zeros for every module."""
    folder, _ = make_tiny_quantized("gptq", "llama", tmp_path, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    load(folder)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"a bias 'model\.layers\.0\.mlp\.up_proj\.bias' that is not zero"):
        load(folder)


def test_values_whose_meaning_is_unclear_are_refused(tmp_path: Path) -> None:
    changes: list[tuple[str, str, Callable[[Tensor], Any], str]] = [
        ("gptq", "q_proj.qzeros", lambda words: words.fill_(-1), "a zero of 0 or of 16"),
        ("gptq", "q_proj.g_idx", lambda index: index.copy_(index.flip(0)), "'desc_act' false"),
        ("gptq-reordered", "q_proj.g_idx", lambda index: index.fill_(0), "32 columns in each group"),
        ("auto-fp8-static", "q_proj.input_scale", lambda scale: scale.fill_(0), "input_scale is 0.0"),
        ("gptq-whole-columns", "q_proj.qzeros", lambda words: words.fill_(0x66666666), "other zeros than 8"),
        ("fbgemm", "q_proj.weight", lambda codes: codes.view(torch.uint8)[2].fill_(0xFF), "no number.* e4m3fnuz"),
        ("fbgemm", "q_proj.weight_scale", lambda scale: scale[3].fill_(torch.nan), "not a positive number"),
        ("awq", "q_proj.scales", lambda scales: scales[0].fill_(torch.inf), "not finite"),
        ("packed", "q_proj.weight_shape", lambda shape: shape.fill_(64).sub_(1), "weight_shape is"),
    ]
    for kind, name, change, named in changes:
        folder, _ = make_tiny_quantized(kind, "llama", tmp_path / f"{kind}-{name}", num_hidden_layers=1)
        tensors = load_file(folder / "model.safetensors")
        change(tensors[f"model.layers.0.self_attn.{name}"])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UnsupportedModel, match=named):
            load(folder)


def test_experts_are_not_quantized_on_load(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3-moe", tmp_path / "experts")
    with pytest.raises(UnsupportedModel, match="has experts"):
        load(folder, OnLoad("fp8"))
