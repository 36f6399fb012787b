"""The model that a baseline computes with, in transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """The model of a folder: float32 on a CPU, bfloat16 elsewhere.

    A folder without weights (`bench.common.random_model`) is given random ones.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if any(folder.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model.to(device).eval()
