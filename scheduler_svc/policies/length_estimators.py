"""How long an output will be: what `sjf` and `ljf` ask. An estimator is a class; others are entry points of the group
`roster.length_estimators`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from scheduler_svc.policy import RequestView

ENTRY_POINT_GROUP = "roster.length_estimators"


class LengthEstimator(Protocol):
    """Predicts output lengths; made without arguments."""

    def predict(self, request: RequestView) -> float:
        """Output tokens, expected."""

    def learn(self, request: RequestView, generated: int) -> None:
        """A sequence of the request has ended with this many tokens."""


class MaxTokens:
    """The request's own limit: an upper bound, and all that is known when tenants do not repeat themselves."""

    def predict(self, request: RequestView) -> float:
        """`max_tokens`."""
        return float(request.max_tokens)

    def learn(self, request: RequestView, generated: int) -> None:
        """Nothing to learn."""


class TenantHistory:
    """The tenant's mean output so far, at most `max_tokens`; the limit itself for a tenant never seen."""

    _MEMORY = 50
    """Sequences after which the mean has forgotten two thirds of what was before."""
    _MAX_TENANTS = 10_000

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def predict(self, request: RequestView) -> float:
        """The smaller of the tenant's mean and `max_tokens`."""
        return min(float(request.max_tokens), self._mean.get(request.tenant, float("inf")))

    def learn(self, request: RequestView, generated: int) -> None:
        """Moves the tenant's mean; the tenant seen first is forgotten when there are too many."""
        mean = self._mean.get(request.tenant)
        if mean is None:
            if len(self._mean) >= self._MAX_TENANTS:
                del self._mean[next(iter(self._mean))]
            self._mean[request.tenant] = float(generated)
        else:
            self._mean[request.tenant] = mean + (generated - mean) / self._MEMORY


_BUILT_IN: dict[str, type[LengthEstimator]] = {"max_tokens": MaxTokens, "tenant_history": TenantHistory}


def available_estimators() -> list[str]:
    """Names, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def load_estimator(name: str) -> LengthEstimator:
    """Makes the estimator of this name. Raises ValueError with a list of what exists."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            estimator: LengthEstimator = entry.load()()
            return estimator
    raise ValueError(f"there is no length estimator {name!r}; there are: {', '.join(available_estimators())}")
