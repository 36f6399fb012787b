"""The accounts of tenants."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.model import ledger as ledger_module
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policy import Account


def test_tenants_beyond_the_bound_share_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MOST_TENANTS", 3)
    ledger = Ledger()
    for number in range(100):
        ledger.charge_prompt(f"tenant-{number}", 2)
    ledger.charge_prompt("tenant-1", 5)
    assert len({ledger.index_of(f"tenant-{number}") for number in range(100)}) == 4
    assert ledger.account("tenant-1").prompt_tokens == 7
    assert ledger.account("tenant-50") == ledger.account("never seen") == Account(prompt_tokens=2 * 97)


def test_a_row_with_several_tokens_is_charged_for_each() -> None:
    """As many tokens as rows: those of a row that drafted, beside a row whose sequence has left."""
    ledger = Ledger()
    tenants = np.array([ledger.index_of(tenant) for tenant in ("a", "b", "a")])
    ledger.charge_sampled(tenants, np.array([1, 1, 0]), once=False)
    ledger.charge_sampled(tenants, np.array([0, 1, 2]), once=True)
    assert [ledger.account(tenant).sampled_tokens for tenant in "ab"] == [3, 3]
