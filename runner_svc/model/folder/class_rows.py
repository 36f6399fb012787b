"""The keys that transformers' configuration classes declare, by the name in a configuration's `architectures`.

`python -m tests.support.class_fields ARCHITECTURE` prints a row, and a test compares the rows with the installed
transformers. `a -> b` says that the class takes `a` for another name of `b`.
"""

TRANSFORMERS = "5.24"
"""The version that the rows were read from."""

DECLARED: dict[str, str] = {
    "LlamaForCausalLM": """
model_type: llama
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int | null = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 11008
max_position_embeddings: int = 2048
mlp_bias: bool = false
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = null
pad_token_id: int | null = null
pretraining_tp: int | null = 1
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "MistralForCausalLM": """
model_type: mistral
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 14336
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int = 8
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "MinistralForCausalLM": """
model_type: ministral
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 14336
layer_types: list[str] | null = null
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int = 8
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "Phi3ForCausalLM": """
model_type: phi3
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
embd_pdrop: float | int = 0.0
eos_token_id: int | list[int] | null = 32000
hidden_act: str = "silu"
hidden_size: int = 3072
initializer_range: float = 0.02
intermediate_size: int = 8192
max_position_embeddings: int = 4096
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = null
original_max_position_embeddings: int = 4096
pad_token_id: int | null = 32000
resid_pdrop: float | int = 0.0
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
sliding_window: int | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32064
""",
    "Qwen2ForCausalLM": """
model_type: qwen2
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 22016
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
max_window_layers: int = 28
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = 32
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 151936
""",
    "Qwen3ForCausalLM": """
model_type: qwen3
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
head_dim: int = 128
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 22016
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
max_window_layers: int = 28
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = 32
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 151936
""",
    "SmolLM3ForCausalLM": """
model_type: smollm3
default_theta: 2000000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = 128000
eos_token_id: int | list[int] | null = 128001
hidden_act: str = "silu"
hidden_size: int = 2048
initializer_range: float = 0.02
intermediate_size: int = 11008
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
mlp_bias: bool = false
no_rope_layer_interval: int = 4
no_rope_layers: list[int] | null = null
num_attention_heads: int = 16
num_hidden_layers: int = 36
num_key_value_heads: int | null = 4
pad_token_id: int | null = 128004
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = null
tie_word_embeddings: bool = true
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 128256
""",
    "GemmaForCausalLM": """
model_type: gemma
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = 2
eos_token_id: int | list[int] | null = 1
head_dim: int = 256
hidden_act: str = "gelu_pytorch_tanh"
hidden_size: int = 3072
initializer_range: float = 0.02
intermediate_size: int = 24576
max_position_embeddings: int = 8192
num_attention_heads: int = 16
num_hidden_layers: int = 28
num_key_value_heads: int = 16
pad_token_id: int | null = 0
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
tie_word_embeddings: bool = true
use_bidirectional_attention: bool | null = null
use_cache: bool = true
vocab_size: int = 256000
""",
    "Gemma2ForCausalLM": """
model_type: gemma2
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int | null = 0.0
attn_logit_softcapping: float | null = 50.0
bos_token_id: int | null = 2
eos_token_id: int | list[int] | null = 1
final_logit_softcapping: float | null = 30.0
head_dim: int = 256
hidden_activation: str = "gelu_pytorch_tanh"
hidden_size: int = 2304
initializer_range: float = 0.02
intermediate_size: int = 9216
layer_types: list[str] | null = null
max_position_embeddings: int = 8192
num_attention_heads: int = 8
num_hidden_layers: int = 26
num_key_value_heads: int = 4
pad_token_id: int | null = 0
query_pre_attn_scalar: int = 256
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = true
use_bidirectional_attention: bool | null = null
use_cache: bool = true
vocab_size: int = 256000
""",
    "Gemma3ForCausalLM": """
model_type: gemma3_text
attention_bias: bool = false
attention_dropout: float | int | null = 0.0
attn_logit_softcapping: float | null = null
bos_token_id: int | null = 2
eos_token_id: int | list[int] | null = 1
final_logit_softcapping: float | null = null
head_dim: int = 256
hidden_activation: str = "gelu_pytorch_tanh"
hidden_size: int = 2304
initializer_range: float = 0.02
intermediate_size: int = 9216
layer_types: list[str] | null = null
max_position_embeddings: int = 131072
num_attention_heads: int = 8
num_hidden_layers: int = 26
num_key_value_heads: int = 4
pad_token_id: int | null = 0
query_pre_attn_scalar: int = 256
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = true
use_bidirectional_attention: bool | null = false
use_cache: bool = true
vocab_size: int = 262208
""",
    "GraniteForCausalLM": """
model_type: granite
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
attention_multiplier: float | int = 1.0
bos_token_id: int | null = 1
embedding_multiplier: float | int = 1.0
eos_token_id: int | list[int] | null = 2
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 11008
logits_scaling: float | int = 1.0
max_position_embeddings: int = 2048
mlp_bias: bool = false
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = null
pad_token_id: int | null = null
residual_multiplier: float | int = 1.0
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "Olmo2ForCausalLM": """
model_type: olmo2
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = 50279
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 11008
max_position_embeddings: int = 2048
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = null
pad_token_id: int | null = 1
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 50304
""",
    "GlmForCausalLM": """
model_type: glm
default_theta: 10000.0
attention_bias: bool = true
attention_dropout: float | int | null = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
head_dim: int | null = 128
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 13696
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_hidden_layers: int = 40
num_key_value_heads: int | null = 2
pad_token_id: int | null = 151329
rms_norm_eps: float = 1.5625e-07
rope_parameters: dict | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 151552
""",
    "Glm4ForCausalLM": """
model_type: glm4
default_theta: 10000.0
attention_bias: bool = true
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
head_dim: int = 128
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 13696
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_hidden_layers: int = 40
num_key_value_heads: int = 2
pad_token_id: int | null = 151329
rms_norm_eps: float = 1.5625e-07
rope_parameters: dict | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 151552
""",
    "CohereForCausalLM": """
model_type: cohere
default_theta: 500000.0
attention_bias: bool = false
attention_dropout: float | int | null = 0.0
bos_token_id: int | null = 5
eos_token_id: int | list[int] | null = 255001
hidden_act: str = "silu"
hidden_size: int = 8192
initializer_range: float = 0.02
intermediate_size: int = 22528
layer_norm_eps: float | null = 1e-05
logit_scale: float | null = 0.0625
max_position_embeddings: int = 8192
num_attention_heads: int = 64
num_hidden_layers: int = 40
num_key_value_heads: int | null = null
pad_token_id: int | null = 0
rope_parameters: dict | null = null
tie_word_embeddings: bool = true
use_cache: bool = true
use_qk_norm: bool | null = false
vocab_size: int = 256000
""",
    "Cohere2ForCausalLM": """
model_type: cohere2
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = 5
eos_token_id: int | list[int] | null = 255001
hidden_act: str = "silu"
hidden_size: int = 8192
initializer_range: float = 0.02
intermediate_size: int = 22528
layer_norm_eps: float = 1e-05
layer_types: list[str] | null = null
logit_scale: float = 0.0625
max_position_embeddings: int = 8192
num_attention_heads: int = 64
num_hidden_layers: int = 40
num_key_value_heads: int | null = null
pad_token_id: int | null = 0
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = true
use_cache: bool = true
vocab_size: int = 256000
""",
    "GPT2LMHeadModel": """
model_type: gpt2
hidden_size -> n_embd
max_position_embeddings -> n_positions
num_attention_heads -> n_head
num_hidden_layers -> n_layer
activation_function: str = "gelu_new"
add_cross_attention: bool = false
attn_pdrop: float | int = 0.1
bos_token_id: int | null = 50256
embd_pdrop: float | int = 0.1
eos_token_id: int | list[int] | null = 50256
initializer_range: float = 0.02
layer_norm_epsilon: float = 1e-05
n_embd: int = 768
n_head: int = 12
n_inner: int | null = null
n_layer: int = 12
n_positions: int = 1024
pad_token_id: int | null = null
reorder_and_upcast_attn: bool = false
resid_pdrop: float | int = 0.1
scale_attn_by_inverse_layer_idx: bool = false
scale_attn_weights: bool = true
summary_activation: null | str = null
summary_first_dropout: float | int = 0.1
summary_proj_to_labels: bool = true
summary_type: str = "cls_index"
summary_use_proj: bool = true
tie_word_embeddings: bool = true
use_cache: bool = true
vocab_size: int = 50257
""",
    "OPTForCausalLM": """
model_type: opt
_remove_final_layer_norm: bool = false
activation_function: str = "relu"
attention_dropout: float | int = 0.0
bos_token_id: int | null = 2
do_layer_norm_before: bool = true
dropout: float | int = 0.1
enable_bias: bool = true
eos_token_id: int | list[int] | null = 2
ffn_dim: int = 3072
hidden_size: int = 768
init_std: float = 0.02
layer_norm_elementwise_affine: bool = true
layerdrop: float | int = 0.0
max_position_embeddings: int = 2048
num_attention_heads: int = 12
num_hidden_layers: int = 12
pad_token_id: int | null = 1
tie_word_embeddings: bool = true
use_cache: bool = true
vocab_size: int = 50272
word_embed_proj_dim: int | null = null
""",
    "MixtralForCausalLM": """
model_type: mixtral
default_theta: 1000000.0
num_experts -> num_local_experts
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 14336
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_experts_per_tok: int = 2
num_hidden_layers: int = 32
num_key_value_heads: int = 8
num_local_experts: int = 8
output_router_logits: bool = false
pad_token_id: int | null = null
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
router_aux_loss_coef: float = 0.001
router_jitter_noise: float = 0.0
sliding_window: int | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "Qwen2MoeForCausalLM": """
model_type: qwen2_moe
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
decoder_sparse_step: int = 1
eos_token_id: int | list[int] | null = null
hidden_act: str = "silu"
hidden_size: int = 2048
initializer_range: float = 0.02
intermediate_size: int = 5632
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
max_window_layers: int = 28
mlp_only_layers: list[int] | null = null
moe_intermediate_size: int = 1408
norm_topk_prob: bool = false
num_attention_heads: int = 16
num_experts: int = 60
num_experts_per_tok: int = 4
num_hidden_layers: int = 24
num_key_value_heads: int | null = 16
output_router_logits: bool = false
pad_token_id: int | null = null
qkv_bias: bool = true
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
router_aux_loss_coef: float = 0.001
shared_expert_intermediate_size: int = 5632
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 151936
""",
    "Qwen3MoeForCausalLM": """
model_type: qwen3_moe
default_theta: 10000.0
num_experts -> num_local_experts
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
decoder_sparse_step: int = 1
eos_token_id: int | list[int] | null = null
hidden_act: str = "silu"
hidden_size: int = 2048
initializer_range: float = 0.02
intermediate_size: int = 6144
max_position_embeddings: int = 32768
mlp_only_layers: list[int] | null = null
moe_intermediate_size: int = 768
norm_topk_prob: bool = false
num_attention_heads: int = 32
num_experts: int = 128
num_experts_per_tok: int = 8
num_hidden_layers: int = 24
num_key_value_heads: int = 4
output_router_logits: bool = false
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
router_aux_loss_coef: float = 0.001
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 151936
""",
    "GptOssForCausalLM": """
model_type: gpt_oss
default_theta: 150000.0
num_experts -> num_local_experts
attention_bias: bool = true
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
head_dim: int = 64
hidden_act: str = "silu"
hidden_size: int = 2880
initializer_range: float = 0.02
intermediate_size: int = 2880
layer_types: list[str] | null = null
max_position_embeddings: int = 131072
num_attention_heads: int = 64
num_experts_per_tok: int = 4
num_hidden_layers: int = 36
num_key_value_heads: int = 8
num_local_experts: int = 128
output_router_logits: bool = false
pad_token_id: int | null = null
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
router_aux_loss_coef: float = 0.001
sliding_window: int | null = 128
swiglu_alpha: float = 1.702
swiglu_limit: float = 7.0
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 201088
""",
    "Glm4MoeForCausalLM": """
model_type: glm4_moe
default_theta: 10000.0
num_local_experts -> n_routed_experts
num_mtp_layers -> num_nextn_predict_layers
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
first_k_dense_replace: int = 1
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 10944
max_position_embeddings: int = 131072
moe_intermediate_size: int = 1408
n_group: int = 1
n_routed_experts: int = 128
n_shared_experts: int = 1
norm_topk_prob: bool = true
num_attention_heads: int = 96
num_experts_per_tok: int = 8
num_hidden_layers: int = 46
num_key_value_heads: int = 8
num_mtp_layers: int = 1
output_router_logits: bool = false
pad_token_id: int | null = null
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
routed_scaling_factor: float = 1.0
tie_word_embeddings: bool = false
topk_group: int = 1
use_cache: bool = true
use_qk_norm: bool = false
vocab_size: int = 151552
""",
    "Dots1ForCausalLM": """
model_type: dots1
default_theta: 10000.0
num_local_experts -> n_routed_experts
attention_bias: bool = false
attention_dropout: float | int | null = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
first_k_dense_replace: int | null = 0
hidden_act: str = "silu"
hidden_size: int = 4608
initializer_range: float = 0.02
intermediate_size: int = 10944
layer_types: list[str] | null = null
max_position_embeddings: int = 2048
max_window_layers: int | null = 62
moe_intermediate_size: int = 1408
n_group: int | null = 1
n_routed_experts: int | null = null
n_shared_experts: int | null = null
norm_topk_prob: bool | null = false
num_attention_heads: int = 32
num_experts_per_tok: int | null = null
num_hidden_layers: int = 62
num_key_value_heads: int | null = 32
output_router_logits: bool = false
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
routed_scaling_factor: float = 1.0
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
topk_group: int | null = 1
use_cache: bool = true
vocab_size: int = 152064
""",
    "Ernie4_5_MoeForCausalLM": """
model_type: ernie4_5_moe
default_theta: 500000.0
num_experts -> moe_num_experts
num_experts_per_tok -> moe_k
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
hidden_act: str = "silu"
hidden_size: int = 2560
initializer_range: float = 0.02
intermediate_size: int = 12288
max_position_embeddings: int = 131072
moe_intermediate_size: int = 1536
moe_k: int | null = 6
moe_layer_end_index: int | null = -1
moe_layer_interval: int | null = 1
moe_layer_start_index: int | null = 1
moe_norm_min: float | null = 1e-12
moe_num_experts: int | null = 64
moe_num_shared_experts: int | null = 2
num_attention_heads: int = 20
num_hidden_layers: int = 28
num_key_value_heads: int | null = 4
output_router_logits: bool | null = false
pad_token_id: int | null = 0
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
router_aux_loss_coef: float | null = 0.001
tie_word_embeddings: bool = true
use_bias: bool | null = false
use_cache: bool = true
vocab_size: int = 103424
""",
}
