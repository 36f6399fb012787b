"""The families by the name in a configuration's `architectures`."""

from __future__ import annotations

from runner_svc.model.families import cohere, gemma, glm, granite, learned_positions, llama, mixtures, olmo2
from runner_svc.model.families.family import Family

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": llama.LLAMA,  # SmolLM and SmolLM2 too
    "MistralForCausalLM": llama.MISTRAL,
    "MinistralForCausalLM": llama.MINISTRAL,
    "Phi3ForCausalLM": llama.PHI3,
    "Qwen2ForCausalLM": llama.QWEN2,
    "Qwen3ForCausalLM": llama.QWEN3,
    "SmolLM3ForCausalLM": llama.SMOLLM3,
    "GemmaForCausalLM": gemma.GEMMA,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "GraniteForCausalLM": granite.GRANITE,
    "Olmo2ForCausalLM": olmo2.OLMO2,
    "GlmForCausalLM": glm.GLM,
    "Glm4ForCausalLM": glm.GLM4,
    "CohereForCausalLM": cohere.COHERE,
    "Cohere2ForCausalLM": cohere.COHERE2,
    "GPT2LMHeadModel": learned_positions.GPT2,
    "OPTForCausalLM": learned_positions.OPT,
    "MixtralForCausalLM": mixtures.MIXTRAL,
    "Qwen2MoeForCausalLM": mixtures.QWEN2_MOE,
    "Qwen3MoeForCausalLM": mixtures.QWEN3_MOE,
    "GptOssForCausalLM": mixtures.GPT_OSS,
    "Glm4MoeForCausalLM": mixtures.GLM4_MOE,
    "Dots1ForCausalLM": mixtures.DOTS1,
    "Ernie4_5_MoeForCausalLM": mixtures.ERNIE4_5_MOE,
}
