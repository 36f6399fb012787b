"""Tiny gpt-oss with experts in MXFP4, as its checkpoints have them, and transformers' model of their numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.tiny_models import make_tiny_model

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def make_tiny_mxfp4(folder: Path, seed: int = 0, **sizes: Any) -> tuple[Path, Any]:
    """Returns the folder of a quantized model, and transformers' model in float32 that computes the same."""
    plain = make_tiny_model("gpt-oss", folder / "plain", seed, **sizes)
    quantized = Path(shutil.copytree(plain, folder / "quantized"))
    tensors, numbers = {}, {}
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = numbers[name] = tensor
            continue
        count, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 124, (count, rows, columns // 32), generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return quantized, transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
