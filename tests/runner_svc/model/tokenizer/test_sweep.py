"""Each fact about a tokenizer, in each file that may hold it: equal to transformers, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler_svc.front.text import tokenizer as front_tokenizer
from tests.support.thoroughness import FULL, choice
from tests.support.tokenizer_folders import KINDS, facts, write_folder
from tests.support.tokenizer_trials import InProcess, Outcome, compare

CASES = [(kind, name) for kind in KINDS for name in facts()]

REFUSED = {
    r"added_tokens(_decoder|\.json): (new at 1|conflict)": "transformers gives the token another id than the file",
    r"added_tokens_decoder hides": "transformers drops the tokens of added_tokens.json",
    r"tokenizer\.json: .* removed": "the ids of later tokens shift",
    r"tokenizer\.json: .* normalized True": "text never has the token",
    r"split_special_tokens": "chat templates couldn't write special tokens",
    r"clean_up_tokenization_spaces True": "not of BPE: the text of an answer would change behind its tokens",
    r"padding_side |foreign": "an unknown key",
    r"(jinja|model|txt): (pointer|a folder|a link)": "the file that is meant is not there",
    r"chat_template 3": "no chat could be rendered",
    r"tokenizer_class (Gemma|Bert)|model_type (gemma2|bert) without": "the class lacks its unknown token",
    r"eos_token_id (\[\]|-1|True|1000000|\[3, -1\]|1\.5)": "no id of the vocabulary",
    r"(suppress_tokens|stop_strings)": "they change which tokens a model may return",
}
"""Facts that transformers serves and that are refused, with the reasons."""


def test_every_fact_is_equal_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_tokenizer, "TemplateRenderer", InProcess)
    every = facts()
    outcomes: dict[tuple[str, str], Outcome] = {}
    for number, (kind, name) in enumerate(choice(CASES, in_ci=CASES[::91])):
        folder = write_folder(kind, tmp_path / str(number))
        every[name].change(folder)
        outcomes[kind, name] = compare(folder)
    assert {case: outcome.differences for case, outcome in outcomes.items() if outcome.differences} == {}
    served = [case for case, outcome in outcomes.items() if outcome.served_there and not outcome.refusal]
    refused = [case for case, outcome in outcomes.items() if outcome.served_there and outcome.refusal]
    print(f"of {len(served) + len(refused)} cases that transformers serves, {len(served)} are served")
    assert {name for _, name in refused if not any(re.search(pattern, name) for pattern in REFUSED)} == set()
    if FULL:
        assert [pattern for pattern in REFUSED if not any(re.search(pattern, name) for _, name in refused)] == []
        assert len(served) >= 0.9 * (len(served) + len(refused))
