"""State that a policy swap keeps: the clock, the tokens that each tenant was served, and the runners' speed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from scheduler_svc.policy import Account, StepTimes

MOST_TENANTS = 65_536
"""Maximum number of accounts; further tenants share one. Without authentication, clients can invent tenants."""

OTHERS = "\0others"
"""Not a valid tenant: metadata can't carry this name."""


class Ledger:
    """Accounts by tenant, as columns: a step charges all its tokens at once. Policies read it as a `LedgerView`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.runners = 0
        self.step_times: StepTimes | None = None
        """Of the slowest runner."""
        self.itl_target_s: float | None = None
        """The service's ITL target."""
        self.prefetch_at = math.inf
        """When a runner's cache wants to load what a conversation will need soon; infinite if none does."""
        self.awaited: dict[tuple[str, str], list[float]] = {}
        """Arrivals of the requests under way of each (tenant, conversation)."""
        self.count_waiting: Callable[[], int] = lambda: 0
        """Returns the prompt tokens that wait in the queue."""
        self._index: dict[str, int] = {}
        self._prompt, self._sampled = np.zeros(64, np.int64), np.zeros(64, np.int64)
        self._lift: list[float] = []

    def index_of(self, tenant: str) -> int:
        """Returns the tenant's row, and opens one if it has none."""
        index = self._index.get(tenant)
        if index is None:
            if len(self._index) >= MOST_TENANTS and tenant != OTHERS:
                return self.index_of(OTHERS)
            index = self._index[tenant] = len(self._index)
            self._lift.append(0.0)
            if index == len(self._prompt):
                self._prompt, self._sampled = (np.pad(c, (0, index)) for c in (self._prompt, self._sampled))
        return index

    def account(self, tenant: str) -> Account:
        """Returns the tenant's account; an empty one if it was never served."""
        index = self._index.get(tenant)
        if index is None and len(self._index) >= MOST_TENANTS:
            index = self._index.get(OTHERS)
        if index is None:
            return Account()
        return Account(int(self._prompt[index]), int(self._sampled[index]), self._lift[index])

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait in the queue."""
        return self.count_waiting()

    def charge_prompt(self, tenant: str, tokens: int) -> None:
        """Charges the tenant for `tokens` computed prompt tokens."""
        self._prompt[self.index_of(tenant)] += tokens

    def restore(self, tenant: str, prompt_tokens: int, sampled_tokens: int) -> None:
        """Charges the tenant for tokens that a former scheduler had computed."""
        index = self.index_of(tenant)
        self._prompt[index] += prompt_tokens
        self._sampled[index] += sampled_tokens

    def charge_sampled(self, tenants: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], once: bool) -> None:
        """Charges one token for each of these rows of `tenants`; a tenant may occur more than once, and a row unless
        `once`."""
        if len(self._index) == 1:
            self._sampled[0] += len(rows)
            return
        counts = np.bincount(tenants if once and len(rows) == len(tenants) else tenants[rows])
        self._sampled[: len(counts)] += counts

    def take_back(self, tenant: str, sampled_tokens: int) -> None:
        """Takes back the charge for tokens that the tenant does not receive: those behind a stop string."""
        index = self.index_of(tenant)
        self._sampled[index] = max(0, self._sampled[index] - sampled_tokens)

    def lift(self, tenant: str, by: float) -> None:
        """Raises the tenant's lift."""
        self._lift[self.index_of(tenant)] += by
