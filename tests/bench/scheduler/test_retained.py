"""`bench.scheduler.retained` on a tiny pool: conversations are evicted and copied while its steps are timed."""

from __future__ import annotations

import pytest

from bench.scheduler import retained

TINY = {"NUM_BLOCKS": 80, "NUM_HOST_BLOCKS": 60, "CACHED_BLOCKS": 60, "SEQUENCES": 3, "OUTPUT_TOKENS": 8, "WARM_UP": 4}


@pytest.mark.parametrize("retention", ["lru", "session"])
@pytest.mark.parametrize("has_tier", [False, True])
def test_steps_are_timed(retention: str, has_tier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TINY.items():
        monkeypatch.setattr(retained, name, value)
    monkeypatch.setattr(retained.gc, "freeze", lambda: None)
    monkeypatch.setattr(retained.gc, "set_threshold", lambda *numbers: None)
    runners = list[retained.NullRunner]()

    class Seen(retained.NullRunner):
        def __init__(self) -> None:
            super().__init__()
            runners.append(self)

    monkeypatch.setattr(retained, "NullRunner", Seen)
    times = list(retained.timed_steps(retention, has_tier, 10, 12))
    assert len(times) == 12 and min(times) >= 0
    assert (runners[0].offloads > 0) is has_tier
