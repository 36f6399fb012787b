"""Models of transformers on a GPU give the tokens of their own `generate`; which of them are captured is printed."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from functools import partial
from pathlib import Path

from runner_svc.gpu.backend import CudaBackend
from tests.support import gpu_backends  # imports CuPy
from tests.support.transformers_models import make_tiny
from tests.support.transformers_sweep import serve_folder

# No mixtures of experts: in 16 bits a router's near tie sends a row to other experts.
CASES = (
    ("llama", "LlamaForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3_text", "Gemma3ForCausalLM"),
    ("phi", "PhiForCausalLM"),
    ("olmo2", "Olmo2ForCausalLM"),
    ("minicpm3", "MiniCPM3ForCausalLM"),
    ("glm4", "Glm4ForCausalLM"),
    ("starcoder2", "Starcoder2ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
)


def load(graphs: list[int], folder: Path, *, num_blocks: int) -> CudaBackend:
    backend = gpu_backends.load(
        folder, torch.float16, num_blocks, num_slots=6, max_step_tokens=64, decoder="transformers"
    )
    del backend.model.eos_token_ids[:]
    graphs.append(len(backend.decode_graphs.sizes))
    return backend


@pytest.mark.parametrize(("model_type", "name"), CASES, ids=[name for _, name in CASES])
def test_tokens_are_those_of_generate(model_type: str, name: str, tmp_path: Path) -> None:
    graphs: list[int] = []
    folder = make_tiny(model_type, name, tmp_path)
    verdict = serve_folder(model_type, name, folder, loader=partial(load, graphs))
    print(name, "graphs of decode steps:", graphs, verdict)
    assert verdict.outcome == "works", verdict
