"""Classes of transformers, served by the engine: `generate`'s tokens, or refused, as docs/models.md says.

ROSTER_TEST_FULL=1 tries all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner_svc.model.config import ARCHITECTURES
from tests.support.thoroughness import FULL, choice
from tests.support.transformers_models import names
from tests.support.transformers_sweep import serve_tiny, sweep

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
ROW = re.compile(r"^\| `([\w-]+)` \| `(\w+)` \| (works|refused)", re.MULTILINE)
LEAST = 95
SOME = ("gemma2", "gpt_oss", "deepseek_v3", "opt", "mimo_v2_flash", "doge", "moshi")
"""Soft caps, sinks and experts, wide keys and narrow values, an inner base model, unlike heads; two are refused."""
IN_CI = ("gpt_oss", "deepseek_v3", "doge")


def written() -> dict[tuple[str, str], str]:
    """Returns the page's outcome by model type and class."""
    return {(kind, name): outcome for kind, name, outcome in ROW.findall(PAGE.read_text("utf-8"))}


def test_the_page_has_enough_classes_that_work() -> None:
    outcomes = list(written().values())
    assert outcomes.count("works") >= LEAST and len(outcomes) >= 138


def test_the_page_has_the_own_decoders_classes() -> None:
    text = PAGE.read_text("utf-8")
    missing = [name for name in ARCHITECTURES if f"| `{name}` | `{ARCHITECTURES[name].model_type}` |" not in text]
    assert missing == [], "run PYTHONPATH=. python docs/generate_models.py --keep"


@pytest.mark.parametrize("kind", choice(SOME, in_ci=IN_CI))
def test_a_class_does_what_the_page_says(kind: str, tmp_path: Path) -> None:
    name, outcome = next((name, outcome) for (listed, name), outcome in written().items() if listed == kind)
    verdict = serve_tiny(kind, name, tmp_path)
    assert verdict.outcome == outcome, verdict.why
    if verdict.outcome == "works":
        assert verdict.preemptions and verdict.cached_tokens


@pytest.mark.skipif(not FULL, reason="ROSTER_TEST_FULL=1 tries all classes")
@pytest.mark.timeout(3600)
def test_every_class_does_what_the_page_says() -> None:
    expected = written()
    unlike = [
        f"{verdict.model_type}: {verdict.outcome} ({verdict.why})"
        for verdict in sweep(names())
        if verdict.outcome != expected.get((verdict.model_type, verdict.name))
    ]
    assert unlike == []
