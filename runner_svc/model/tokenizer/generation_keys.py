"""The keys of generation_config.json: used, harmless (with the reason), or refused by name.

A request to Roster states its own sampling, so the defaults that a publisher suggests are not used; the log names them.
What forbids or forces tokens whatever the request says is refused unless its value has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner_svc.model.tokenizer.errors import UnusableTokenizer

USED = frozenset({"eos_token_id"})

SUGGESTED = frozenset(
    {
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "epsilon_cutoff",
        "eta_cutoff",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "penalty_alpha",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Defaults of requests that state nothing: each request to Roster states its own sampling."""

_OUTPUT = "it says what `generate` returns beside tokens"
_SPEED = "it says how `generate` computes the same tokens"
_ORIGIN = "it says where the file came from"
_OTHER_ID = "the prompt is built by the tokenizer and the chat template"
_OWN_CODE = "only the publisher's own code reads it"
HARMLESS: dict[str, str] = {
    **dict.fromkeys(
        (
            "output_attentions",
            "output_hidden_states",
            "output_logits",
            "output_scores",
            "return_dict_in_generate",
            "return_timestamps",
        ),
        _OUTPUT,
    ),
    **dict.fromkeys(
        (
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
            "attn_implementation",
            "cache_config",
            "cache_implementation",
            "compile_config",
            "continuous_batching_config",
            "disable_compile",
            "generation_kwargs",
            "is_assistant",
            "low_memory",
            "max_cache_len",
            "max_matching_ngram_size",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "prefill_chunk_size",
            "prompt_lookup_num_tokens",
            "renormalize_logits",
            "remove_invalid_values",
            "speculation_type",
            "target_lookbehind",
            "use_cache",
            "use_mtp",
        ),
        _SPEED,
    ),
    **dict.fromkeys(
        ("_commit_hash", "_from_model_config", "transformers_version", "trust_remote_code", "model_type"), _ORIGIN
    ),
    **dict.fromkeys(
        ("bos_token_id", "decoder_start_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id"),
        _OTHER_ID,
    ),
    **dict.fromkeys(("assistant_token_id", "chat_format", "max_window_size", "user_token_id"), _OWN_CODE),
}
"""Keys that change no token, each with the reason."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
"""Keys that forbid, force or shift tokens, with the values beside null that do neither."""


def check_generation_keys(generation_config: Mapping[str, Any]) -> list[str]:
    """Returns sentences for the log on what generation_config.json suggests and is not used.

    Raises UnusableTokenizer for a key that is neither used nor harmless.
    """
    for key, value in generation_config.items():
        if value is None or key in USED or key in SUGGESTED or key in HARMLESS or key.startswith("_"):
            continue
        if key not in NEUTRAL:
            raise UnusableTokenizer(
                f"generation_config.json has the key {key!r}, which Roster doesn't know; remove it if it changes "
                "nothing."
            )
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[key]):
            raise UnusableTokenizer(
                f"generation_config.json has {key!r}: {value!r}, which changes the tokens that a model may return and "
                "isn't supported; remove it to serve the model without it."
            )
    suggested = [f"{key} {generation_config[key]!r}" for key in sorted(SUGGESTED & generation_config.keys())]
    if not suggested:
        return []
    return [f"generation_config.json suggests {', '.join(suggested)}: requests state their own sampling."]
