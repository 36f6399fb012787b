"""The account of a file's keys."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.keys import HARMLESS, Keys
from tests.support.gguf_cases import HARMLESS_EXAMPLES

# Keys that other tests have: of parts, of alignment, and of tokens for infilling.
ELSEWHERE = ("split.no", "{arch}.rope.dimension_sections", "general.alignment", "tokenizer.ggml.fim_pre_token_id")


def keys(**more: Any) -> Keys:
    renamed = {name.replace("__", "."): value for name, value in more.items()}
    return Keys({"general.architecture": "llama", **renamed})


@pytest.mark.parametrize("pattern", HARMLESS)
def test_each_harmless_key_is_tried_and_has_a_reason(pattern: str) -> None:
    assert any(re.fullmatch(pattern, example) for example in (*HARMLESS_EXAMPLES, *ELSEWHERE))
    assert HARMLESS[pattern]


def test_what_has_been_read_is_not_refused() -> None:
    read = keys(llama__block_count=2, llama__rope__freq_base=1.0, foo="x")
    assert read.integer(".block_count") == 2
    assert read.number(".rope.freq_base") == 1.0
    with pytest.raises(GgufError, match=r"Its key 'foo' \('x'\) is unknown for the architecture 'llama', or has"):
        read.refuse_rest()
    assert read.text("foo") == "x"
    read.refuse_rest()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("2", r"Its llama.block_count is '2', where an integer of at least 1 is needed\."),
        (0, r"Its llama.block_count is 0, where an integer of at least 1 is needed\."),
        (True, r"Its llama.block_count is True, where an integer of at least 1 is needed\."),
        (2.0, r"Its llama.block_count is 2.0, where an integer of at least 1 is needed\."),
        ([2, 3], r"Its llama.block_count is \[2, 3\], which differs between layers; all must have the same\."),
        ([], r"Its llama.block_count is \[\], where an integer of at least 1 is needed\."),
        ("x" * 1000, r"Its llama.block_count is 'x{56}\.\.\., where"),
    ],
)
def test_another_type(value: Any, sentence: str) -> None:
    with pytest.raises(GgufError, match=sentence):
        keys(llama__block_count=value).integer(".block_count")


def test_an_array_of_equal_elements_is_its_element() -> None:
    assert keys(llama__block_count=[2, 2]).integer(".block_count") == 2


def test_a_key_that_must_be_there() -> None:
    with pytest.raises(GgufError, match=r"It has no key 'llama.block_count', which must be there\."):
        keys().integer(".block_count")
    with pytest.raises(GgufError, match=r"It has no key 'general.architecture', which must be there\."):
        Keys({})
