"""What becomes of the keys of a config.json; `test_config_sweep` compares the answers with transformers'."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import BrokenModel, UnsupportedModel
from runner_svc.model.folder.class_fields import class_fields
from runner_svc.model.folder.class_rows import DECLARED
from runner_svc.model.folder.config_keys import COMPLETED, checked_config, harmless_keys, used_keys
from runner_svc.model.folder.harmless_keys import FIXED, HARMLESS
from runner_svc.model.rope_config import RopeType
from tests.support.config_cases import PUBLISHED
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_models import SIZES as TINY

ROOT = Path(__file__).parents[4]
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "head_dim": 16,
}


def config(architecture: str, **keys: Any) -> ModelConfig:
    name = f"{architecture}ForCausalLM"
    return ModelConfig.from_hugging_face({"architectures": [name], **SIZES, **keys})


@pytest.mark.parametrize("architecture", DECLARED)
def test_each_key_of_a_class_is_used_or_harmless(architecture: str) -> None:
    declared = class_fields(architecture).fields.keys()
    assert declared <= used_keys(architecture) | harmless_keys(architecture).keys()
    assert not used_keys(architecture) & harmless_keys(architecture).keys()
    assert all(reason.endswith(".") for reason in harmless_keys(architecture).values())


def test_a_key_that_is_fixed_is_not_harmless_as_well() -> None:
    for name in COMPLETED:
        neither = FIXED.keys() - used_keys(name)
        for key in neither:
            value = "another value"
            with pytest.raises(UnsupportedModel, match=f"'{key}'"):
                checked_config({"architectures": [name], **SIZES, key: value}, DECLARED)


@pytest.mark.parametrize(
    ("architecture", "window"),
    [("Mistral", 4096), ("Ministral", 4096), ("Phi3", None), ("Qwen2", None), ("Llama", None)],
)
def test_an_absent_window_is_that_of_the_class(architecture: str, window: int | None) -> None:
    assert config(architecture).windows == (window,) * 4


def test_a_class_without_windows_has_none() -> None:
    assert config("Llama", sliding_window=7, use_sliding_window=True, max_window_layers=0).windows == (None,) * 4
    assert config("Qwen3", sliding_window=7, use_sliding_window=False).windows == (None,) * 4
    assert config("Qwen3", sliding_window=0, use_sliding_window=False).windows == (None,) * 4


def test_other_defaults_of_classes() -> None:
    assert config("Phi3").norm_eps == 1e-5
    assert [config(name).num_kv_heads for name in ("Llama", "Phi3", "Mistral", "SmolLM3")] == [32, 32, 8, 4]
    with pytest.raises(UnsupportedModel, match="4 attention heads are not a multiple of 8"):
        config("Mistral", num_attention_heads=4)
    assert config("SmolLM3").ropes[0].theta == 2_000_000
    assert config("SmolLM3").tied_embeddings and not config("Llama").tied_embeddings
    assert config("Mistral").context_length == 131_072


def test_a_share_of_the_head_that_rotates_is_read_where_the_class_reads_it() -> None:
    assert config("Llama", partial_rotary_factor=0.5).ropes[0].rotary_dim == 16
    assert config("Phi3", partial_rotary_factor=0.5).ropes[0].rotary_dim == 8
    with pytest.raises(UnsupportedModel, match=r"'partial_rotary_factor' 0\.5 with RoPE type 'linear'"):
        config("Llama", partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0})


def test_which_spelling_of_rope_counts() -> None:
    new, old = {"rope_type": "default", "rope_theta": 5.0}, {"type": "linear", "factor": 2.0}
    both = config("Llama", rope_parameters=new, rope_scaling=old, rope_theta=7.0).ropes[0]
    assert (both.type, both.theta, both.factor) == (RopeType.LINEAR, 7.0, 2.0)
    assert config("Llama", rope_parameters=new, rope_theta=7.0).ropes[0].theta == 5.0
    assert config("Llama", rope_theta=7.0).ropes[0].theta == 7.0
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    beside = config("Llama", rope_parameters=yarn, original_max_position_embeddings=32).ropes[0]
    assert beside.original_positions == 32


def test_phi_3_with_longrope_ends_at_the_positions_of_pretraining() -> None:
    """Its `generate` computes the cache again there; the decoder of transformers' classes has the same rule."""
    factors: dict[str, Any] = {"short_factor": [1] * 8, "long_factor": [2.5] * 8}
    sizes = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
    for kind in ("longrope", "su", "yarn"):
        read = config("Phi3", rope_scaling={"type": kind, **factors}, **sizes)
        assert (read.ropes[0].type, read.ropes[0].original_positions) == (RopeType.LONGROPE, 4096)
        assert (read.context_length, read.prefix_positions) == (4096, 4096) and read.why_shorter
    # Its class has a default beside the parameters, which counts before what they have.
    inside = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    assert config("Phi3", rope_parameters=inside).ropes[0].original_positions == 4096
    llama = config("Llama", rope_parameters=inside)
    assert (llama.context_length, llama.prefix_positions, llama.why_shorter) == (2048, 64, None)
    with pytest.raises(UnsupportedModel, match="'longrope' needs 'long_factor' to be 8 numbers"):
        config("Llama", rope_parameters={**inside, "long_factor": [1.0] * 7})


def test_mistral_with_layer_types_is_ministral() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    raw = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **SIZES}
    read = ModelConfig.from_hugging_face({**raw, "layer_types": kinds, "sliding_window": 7})
    assert (read.architecture, read.windows) == ("MinistralForCausalLM", (7, None, 7, None))


def test_the_model_type_decides() -> None:
    assert config("Llama", model_type="mistral").architecture == "MistralForCausalLM"


def test_code_beside_an_architecture_of_its_own_is_left_aside() -> None:
    assert config("Phi3", auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}).architecture == "Phi3ForCausalLM"
    with pytest.raises(UnsupportedModel, match="'trust_remote_code' True"):
        config("Phi3", trust_remote_code=True)


@pytest.mark.parametrize("family", PUBLISHED)
def test_keys_of_publishers_say_again_what_the_class_computes(family: str) -> None:
    config_class, overrides = FAMILIES[family]
    raw = json.loads(config_class(**copy.deepcopy({**TINY, **overrides})).to_json_string(use_diff=False))
    raw = {"architectures": None, **raw}
    expected = ModelConfig.from_hugging_face(raw)
    assert ModelConfig.from_hugging_face({**raw, **PUBLISHED[family]}) == expected
    for key in PUBLISHED[family].keys() - HARMLESS.keys():
        with pytest.raises(UnsupportedModel, match=f"'{key}' 'another'"):
            ModelConfig.from_hugging_face({**raw, key: "another"})


def test_ends_are_those_that_the_file_names_and_the_model_can_draw() -> None:
    assert config("Llama").eos_token_ids == ()
    assert config("Llama", eos_token_id=[1, 99, 100, 5000]).eos_token_ids == (1, 99)


@pytest.mark.parametrize(
    ("architecture", "keys", "named"),
    [
        ("Llama", {"eos_token_id": -1}, "'eos_token_id'"),
        ("Llama", {"eos_token_id": "2"}, "'eos_token_id' to be an integer or a list of integers or null, it has '2'"),
        ("Llama", {"eos_token_id": [1, -1]}, r"'eos_token_id'.*\[1, -1\]"),
        ("Llama", {"hidden_size": 64.0}, "'hidden_size' to be an integer, it has 64.0"),
        ("Llama", {"num_hidden_layers": 10**9}, "'num_hidden_layers' of at most 4096"),
        ("Llama", {"max_position_embeddings": 10**40}, "'max_position_embeddings' of at most .* a number of 133 bits"),
        ("Llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps'"),
        ("Llama", {"rope_scaling": [1]}, "'rope_scaling' to be an object or null"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "'factor'.*it has '2'"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 1e400}}, "'factor'"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, "'factor' 1e.300 of 2048 positions"),
        ("Mistral", {"sliding_window": 0}, "'sliding_window'"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "'no_rope_layer_interval'"),
    ],
)
def test_a_broken_value_is_named(architecture: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(BrokenModel, match=named):
        config(architecture, **keys)


@pytest.mark.parametrize(
    ("architecture", "keys", "named"),
    [
        ("Llama", {"no such key": 1}, "'no such key'"),
        ("Llama", {"torch_dtype": "int8"}, "'torch_dtype' 'int8'.*bfloat16"),
        ("Llama", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' 50.0"),
        ("Llama", {"layer_types": ["full_attention"] * 3}, "3 'layer_types' for 'num_hidden_layers' 4"),
        ("Llama", {"layer_types": ["sliding_attention"] * 4}, "'layer_types' with sliding_attention"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "no window"),
        ("Qwen2", {"layer_types": ["linear_attention"] * 4}, "'linear_attention'"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "2 'no_rope_layers' for 'num_hidden_layers' 4"),
        ("Llama", {"model_type": "mamba"}, "Architecture of model_type 'mamba' is not supported"),
        ("Llama", {"architectures": ["LlamaForSequenceClassification"]}, "Architecture LlamaForSequenceClassification"),
        ("Llama", {"quantization_config": {}}, "quantized"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "no such": 1}}, "'no such'"),
        ("Phi3", {"rope_scaling": {"type": "su"}}, "'longrope'"),
        ("Ministral", {"head_dim": None}, "needs 'head_dim'"),
    ],
)
def test_what_would_change_answers_is_refused(architecture: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config(architecture, **keys)


def test_a_folder_is_judged_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path; from runner_svc.model.checkpoint.servable import why_not\n"
        f"print(why_not(Path({str(tmp_path)!r})))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert "Architecture MambaForCausalLM is not supported" in finished.stdout, finished.stderr
