"""The sweep of configurations: what transformers serves is served with its answers, or refused for a reviewed reason.

With ROSTER_TEST_FULL=1 all cases are tried, and `pytest -rP` shows the refusals and how many of the cases they are.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_cases import (
    FAMILIES,
    MIXTURES,
    OTHER_FAMILIES,
    TOO_LARGE_FOR_A_TEST,
    Case,
    cases,
    wrong_cases,
)
from tests.support.config_oracle import Verdict, compare, refusal, variant
from tests.support.thoroughness import FULL, choice, count
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(3600)
GROUPS = {"llama-like": FAMILIES, "others": OTHER_FAMILIES, "mixtures": MIXTURES}
CASES_IN_CI = 48
WRONG_CASES, WRONG_CASES_IN_CI = 2000, 120

REFUSED = {
    r"Activation '\w+' is not supported": "The decoders have the activations that nearly all models have.",
    r"RoPE type '\w+' is not supported": "Phi-3 turns others into longrope; proportional is Gemma 4's.",
    r"needs 'rope_parameters' to have an object for each": "transformers leaves parameters of no layer type aside.",
    r"has 'truncate' false in the RoPE parameters of a layer type": "transformers reads it beside the layer types.",
    r"has 'type' in 'rope_scaling'": "transformers' class drops it where rope_parameters are absent.",
    r"'partial_rotary_factor' .* beside RoPE parameters by layer type": "No model of the class has it.",
    r"differ by layer type": "transformers ignores the parameters of a layer type that the class does not have.",
    r"has '\w+' .*, but \w+ has no such key in transformers": "It would mean another computation, which would be lost.",
    r"has '\w+' .*, but \w+ computes what": "It would mean another computation, which would be lost.",
    r"and '\w+' .*, of which \w+ reads the second": "One of two keys that mean the same is wrong.",
    r"has a key '[\w ]+', which is not known": "Nothing says that it changes no answer.",
    r"needs 'eos_token_id' to be token ids": "A negative id ends nothing.",
    r"Architecture \w+ is not supported": "The folder says that it is another model.",
    r"has a tensor '.*', which \w+ with its config.json lacks": "A model without a tensor it was trained with errs.",
    r"has 'layer_types' with sliding_attention, which": "transformers' cache drops keys that its forward pass reads.",
    r"is more than the \d+ experts of 'topk_group' groups": "Experts of groups that are not chosen would fill up.",
    r"needs a positive integer 'sliding_window'": "There is no window of 0 tokens.",
    r"'num_experts' \d+ and 'num_local_experts' \d+, which mean the same": "Which one counts depends on their order.",
}
"""Why a case is refused that transformers serves, by a pattern of the sentence."""


@pytest.fixture(scope="module", params=choice(list(GROUPS), in_ci=["llama-like"]))
def bases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {family: make_tiny_model(family, root / family) for family in GROUPS[request.param]}


def chosen(
    bases: dict[str, Path], of_family: Callable[[str, dict[str, Any]], Iterator[Case]], full: int | None, in_ci: int
) -> Sequence[Case]:
    every = [
        case
        for family, base in bases.items()
        for case in of_family(family, json.loads((base / "config.json").read_text()))
    ]
    return random.Random(20).sample(every, count(full or len(every), in_ci=in_ci))


def reviewed(sentence: str) -> str | None:
    return next((reason for pattern, reason in REFUSED.items() if re.search(pattern, sentence)), None)


def test_each_case_is_answered_as_by_transformers_or_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    served: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    faults = []
    for number, case in enumerate(tried := chosen(bases, cases, None, CASES_IN_CI)):
        folder = variant(bases[case.family], tmp_path / str(number), case.changes, case.removed)
        if case.removed in TOO_LARGE_FOR_A_TEST:
            sentence = refusal(folder)
        else:
            sentence = None
        verdict = compare(folder) if sentence is None else Verdict(sentence, "its tensors have other shapes")
        if verdict.difference is not None:
            faults.append(f"{case}: {verdict.difference}")
        if verdict.theirs is None and verdict.ours is None:
            served[case.family] += 1
        elif verdict.theirs is None:
            refused[case.family] += 1
            reason = reviewed(str(verdict.ours))
            if reason is None:
                faults.append(f"{case}: not reviewed: {verdict.ours}")
            reasons[str(reason)] += 1
            print(f"refused: {case}: {verdict.ours}")
    for reason, times in reasons.most_common():
        print(f"{times} refused: {reason}")
    for family in served:
        print(f"{family}: {served[family]} served of {served[family] + refused[family]} that transformers serves")
    print(f"{len(tried)} cases; transformers serves {(served + refused).total()}, of which Roster {served.total()}")
    assert not faults, "\n".join(faults)
    assert served.total() >= (0.9 if FULL else 0.5) * (served + refused).total()


def test_values_of_any_type_are_answered_as_by_transformers_or_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    refused = 0
    for number, case in enumerate(tried := chosen(bases, wrong_cases, WRONG_CASES, WRONG_CASES_IN_CI)):
        folder = variant(bases[case.family], tmp_path / str(number), case.changes)
        sentence = refusal(folder)
        refused += sentence is not None
        if sentence is None and FULL:
            assert (difference := compare(folder).difference) is None, f"{case}: {difference}"
        assert sentence is None or ("\n" not in sentence and len(sentence) < 700), f"{case}: {sentence}"
    print(f"{len(tried)} cases, of which {refused} are refused")
