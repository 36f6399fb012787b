"""Drafted and accepted tokens by position, for the metrics."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from scheduler_svc.metrics.collector import RosterCollector
from scheduler_svc.metrics.draft_positions import DraftPositions, DraftState
from tests.support.in_process import Stack

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")


def test_rows_count_at_each_position_up_to_their_lengths() -> None:
    counts, rng = DraftPositions(), np.random.default_rng(0)
    counts.know("ngram", 3)
    assert counts.states() == {"ngram": DraftState((0, 0, 0), (0, 0, 0))}
    drafted = rng.integers(0, 8, 1000)
    accepted = rng.integers(0, drafted + 1)
    for part in np.split(np.arange(1000), 10):
        counts.add("ngram", drafted[part].astype(np.int32), accepted[part].astype(np.uint8))
    state = counts.states()["ngram"]
    assert state.drafted == tuple(int((drafted >= position).sum()) for position in range(1, 8))
    assert state.accepted == tuple(int((accepted >= position).sum()) for position in range(1, 8))
    assert (counts.drafted_tokens, counts.accepted_tokens) == (drafted.sum(), accepted.sum())
    counts.add("other", np.array([0, 1]), np.array([0, 1]))
    assert set(counts.states()) == {"ngram", "other"} and counts.drafted_tokens == drafted.sum() + 1


def test_the_families_have_the_documented_labels_and_agree() -> None:
    snapshot = replace(
        Stack().engine.snapshots.take_snapshot(), decode_rows=20, drafts={"ngram": DraftState((9, 5), (6, 1))}
    )
    samples = {
        (sample.name, sample.labels.get("position", "")): (sample.value, frozenset(sample.labels))
        for family in RosterCollector(lambda: snapshot).collect()
        for sample in family.samples
        if re.search("drafted|accepted|wasted_positions|decode_rows", sample.name)
    }
    by = frozenset({"drafter", "position"})
    assert samples == {
        ("roster_decode_rows_total", ""): (20, frozenset()),
        ("roster_drafted_tokens_total", ""): (14, by - {"position"}),
        ("roster_accepted_tokens_total", ""): (7, by - {"position"}),
        ("roster_wasted_positions_total", ""): (7, by - {"position"}),
        ("roster_drafted_tokens_by_position_total", "1"): (9, by),
        ("roster_drafted_tokens_by_position_total", "2"): (5, by),
        ("roster_accepted_tokens_by_position_total", "1"): (6, by),
        ("roster_accepted_tokens_by_position_total", "2"): (1, by),
    }
    for (name, _), (_, labels) in samples.items():
        (cells,) = re.findall(rf"^\| `{name}` \| counter \| \w+ \| (.*?) \|", PAGE, re.MULTILINE)
        assert frozenset(re.findall(r"`(\w+)`", cells)) == labels
