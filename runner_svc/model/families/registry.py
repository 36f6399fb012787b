"""The families by the name in a configuration's `architectures`."""

from __future__ import annotations

from runner_svc.model.families import llama
from runner_svc.model.families.family import Family

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": llama.LLAMA,  # SmolLM and SmolLM2 too
    "MistralForCausalLM": llama.MISTRAL,
    "MinistralForCausalLM": llama.MINISTRAL,
    "Phi3ForCausalLM": llama.PHI3,
    "Qwen2ForCausalLM": llama.QWEN2,
    "Qwen3ForCausalLM": llama.QWEN3,
    "SmolLM3ForCausalLM": llama.SMOLLM3,
}
