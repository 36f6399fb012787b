"""Keys of a config.json that change no answer, each with the reason; and keys that have to keep one value.

`runner_svc.model.folder.config_keys` says how the tables meet those of the architectures.
"""

from __future__ import annotations

from typing import Any

_REASONS: dict[str, str] = {
    "It says where the file comes from.": "transformers_version _name_or_path _model_name_or_path name_or_path "
    "_commit_hash tokenizer_class processor_class finetuning_task task_specific_params model_name license "
    "unsloth_fixed unsloth_version unsloth_training_args huggingface_hub_version exporter is_llama_config "
    "transformers.js_config output_past",
    "It matters in training only.": "attention_dropout hidden_dropout resid_pdrop embd_pdrop emb_pdrop attn_pdrop "
    "dropout embedding_dropout residual_dropout classifier_dropout layerdrop activation_dropout "
    "attn_dropout attention_probs_dropout_prob hidden_dropout_prob rotary_dropout initializer_range initializer_factor "
    "init_std initializer_cutoff_factor gradient_checkpointing pretraining_tp router_aux_loss_coef router_z_loss_coef "
    "router_jitter_noise moe_capacity output_router_logits aux_loss_alpha seq_aux ep_size loss_type z_loss_coefficient",
    "It says how transformers computes, not what.": "use_cache torchscript use_bfloat16 chunk_size_feed_forward "
    "output_hidden_states output_attentions _output_attentions return_dict use_return_dict attn_implementation "
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled "
    "use_flash_attn use_flash_attention experts_implementation _experts_implementation_internal tie_last_hidden_states "
    "cache_implementation use_mem_efficient_attention memory_efficient_attention reorder_and_upcast_attn "
    "use_parallel_embedding",
    "transformers writes it and does not read it.": "_sliding_window_pattern ignore_keys_at_rope_validation "
    "_post_init_done",
    "The request says how tokens are drawn.": "assistant_confidence_threshold assistant_lookbehind bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p "
    "generation_config",
    "The tokenizer's files say which tokens these are.": "bos_token_id pad_token_id sep_token_id cls_token_id "
    "mask_token_id unk_token_id decoder_start_token_id prefix eos_token bos_token pad_token model_max_length "
    "eod_token_id image_token_id audio_token_id boa_token_id boi_token_id eoa_token_id eoi_token_id",
    "It belongs to a classifier.": "id2label label2id num_labels _num_labels problem_type summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj n_special predict_special_tokens",
    "The code that it names is never run, as transformers does not run it for an architecture of its own.": "auto_map",
}

_FOREIGN_REASONS: dict[str, str] = {
    "What it describes has tensors of its own, which are refused by name.": "decoder_sparse_step first_k_dense_replace "
    "interleave_moe_layer_step moe_layer_freq intermediate_size_mlp kv_lora_rank q_lora_rank mlp_only_layers "
    "moe_intermediate_size shared_expert_intermediate_size moe_layers n_group n_routed_experts n_shared_experts "
    "norm_topk_prob num_experts num_experts_per_tok num_local_experts num_mtp_layers num_nextn_predict_layers "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim routed_scaling_factor scoring_func topk_group topk_method "
    "moe_use_aux_free swiglu_limit swiglu_alpha conv_L_cache conv_bias use_qk_norm qk_layernorm attention_out_bias "
    "qkv_bias use_qkv_bias use_bias bias enable_bias audio_soft_tokens_per_image vision_soft_tokens_per_image",
    "It is another class's name for a size, and no class here reads it.": "n_embd n_head n_heads n_layer n_layers "
    "n_inner n_positions n_ctx d_model max_sequence_length seq_length max_seq_length max_seq_len ffn_dim "
    "ffn_hidden_size num_kv_heads word_embed_proj_dim "
    "layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon block_auto_adjust_ff_dim block_ffn_dim_multiplier "
    "block_multiple_of full_attn_idxs",
}

HARMLESS: dict[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
"""The reason why a key changes no answer of any architecture, by the key."""

FOREIGN: dict[str, str] = {key: reason for reason, keys in _FOREIGN_REASONS.items() for key in keys.split()}
"""The reason why a key changes no answer of the architectures whose classes do not declare it, by the key."""

_OFF = (None, False, 0)

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping", "query_pre_attn_scalar"),
        (_OFF, "scores and logits are capped and scaled"),
    ),
    **dict.fromkeys(
        (
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "logit_scale",
            "attn_scale",
        ),
        ((None, 1, 1.0), "values are multiplied"),
    ),
    **dict.fromkeys(
        (
            "alibi",
            "attention_chunk_size",
            "attn_temperature_tuning",
            "clip_qkv",
            "floor_scale",
            "is_prefix_lm",
            "scale_attn_by_inverse_layer_idx",
            "sliding_window_pattern",
            "use_bidirectional_attention",
            "use_mrope",
            "num_kv_shared_layers",
        ),
        (_OFF, "attention is of another kind"),
    ),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), ((None, 1), "attention is of another kind")),
    "rotary_pct": ((None, 1), "a part of each head rotates"),
    "lm_head_bias": (_OFF, "the head has a bias"),
    **dict.fromkeys(
        ("activation", "activation_function", "hidden_activation"),
        ((None, "silu", "swiglu"), "another key names the activation"),
    ),
    **dict.fromkeys(
        ("parallel_attn", "use_parallel_residual", "new_decoder_architecture", "multi_query"),
        (_OFF, "layers are of another kind"),
    ),
    **dict.fromkeys(("rope_interleave", "rope_interleaved"), (_OFF, "neighbouring dimensions rotate together")),
    **dict.fromkeys(
        ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "cross_attention_hidden_size"),
        (_OFF, "a decoder reads an encoder"),
    ),
    **dict.fromkeys(
        ("do_layer_norm_before", "layer_norm_elementwise_affine", "scale_attn_weights", "use_rmsnorm"),
        ((None, True), "norms or scores are of another kind"),
    ),
    **dict.fromkeys(("moe_gate",), ((None, "topk"), "experts are chosen in another way")),
    **dict.fromkeys(("_remove_final_layer_norm",), (_OFF, "there is no last norm")),
    **dict.fromkeys(("pruned_heads", "per_layer_config"), ((None, {}, []), "layers differ in their sizes")),
    **dict.fromkeys(("trust_remote_code",), (_OFF, "code of the folder would run")),
}
"""For each key, the values that change nothing, and what another value would mean."""

OWN_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "Cohere2ForCausalLM": {
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    },
}
"""By class, keys of its publishers that transformers does not read, and the values that say what it computes."""

REPEATED = {
    "activation_function": "hidden_act",
    "experts_per_token": "num_experts_per_tok",
    "hidden_activation": "hidden_act",
    "initial_context_length": "original_max_position_embeddings",
    "layer_switch": "sliding_window_pattern",
    "sliding_window_size": "sliding_window",
    "use_embedding_sharing": "tie_word_embeddings",
}
"""Keys of publishers that say again what a key says that the class reads: harmless where both have one value."""
