"""Pairs of features under every event (see `tests/support/pair_table.py`).

`ROSTER_TEST_FULL=1` tests all pairs, in about two minutes; CI tests some, which include each feature with each event.
"""

from __future__ import annotations

import pytest

from tests.support import pair_table
from tests.support.pair_table import EVENTS, FEATURES, all_cases, differences, some_cases
from tests.support.thoroughness import FULL

CASES = all_cases() if FULL else some_cases(5)


def test_what_is_tried_has_each_feature_under_each_event() -> None:
    assert len(all_cases()) == (8 + 28 + 1) * len(EVENTS) * len(pair_table.MOMENTS)
    assert {(feature, case.event) for case in CASES for feature in case.features} == {
        (feature, event) for feature in FEATURES for event in EVENTS
    }


@pytest.mark.timeout(1800)
def test_an_event_changes_nothing() -> None:
    told = [line for case in CASES for line in differences(case)]
    assert not told, "\n".join(told)
