"""The rows of transformers' configuration classes, against the installed transformers."""

from __future__ import annotations

import pytest
import transformers

from runner_svc.model.families.registry import ARCHITECTURES
from runner_svc.model.folder.class_fields import BASE_FIELDS, class_fields
from runner_svc.model.folder.class_rows import DECLARED, TRANSFORMERS
from tests.support.class_fields import base_fields, declared

INSTALLED = ".".join(transformers.__version__.split(".")[:2])
same_version = pytest.mark.skipif(INSTALLED != TRANSFORMERS, reason=f"transformers is {INSTALLED}")


@same_version
@pytest.mark.parametrize("architecture", DECLARED)
def test_a_row_is_what_the_class_declares(architecture: str) -> None:
    assert DECLARED[architecture].strip() == declared(architecture)


@same_version
def test_the_keys_of_all_classes() -> None:
    assert {key: (set(field.kinds), field.default) for key, field in BASE_FIELDS.items()} == base_fields()


def test_each_architecture_has_a_row_of_its_model_type() -> None:
    assert ARCHITECTURES.keys() <= DECLARED.keys()
    for name, family in ARCHITECTURES.items():
        assert class_fields(name).model_type == family.model_type


def test_defaults_that_differ_between_classes() -> None:
    def default(architecture: str, key: str) -> object:
        return class_fields(f"{architecture}ForCausalLM").fields[key].default

    assert default("Mistral", "sliding_window") == default("Ministral", "sliding_window") == 4096
    assert (default("Phi3", "rms_norm_eps"), default("Llama", "rms_norm_eps")) == (1e-5, 1e-6)
    assert [default(name, "num_key_value_heads") for name in ("Llama", "Mistral", "SmolLM3")] == [None, 8, 4]
