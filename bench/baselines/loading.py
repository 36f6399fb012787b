"""Loading of a baseline's model, in transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """Loads the model of a folder: float32 on a CPU, bfloat16 elsewhere.

    If the folder has no weights (`bench.common.random_model`), they are random.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if any(folder.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model.to(device).eval()
