"""Estimators of output length for `sjf` and `ljf`. Further estimators are classes installed as entry points of the
group `roster.length_estimators`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from scheduler_svc.policy import RequestView

ENTRY_POINT_GROUP = "roster.length_estimators"


class LengthEstimator(Protocol):
    """Predictor of output lengths; its class is called without arguments."""

    def predict(self, request: RequestView) -> float:
        """Returns the expected number of output tokens."""

    def learn(self, request: RequestView, generated: int) -> None:
        """Learns that a sequence of the request has ended with `generated` tokens."""


class MaxTokens:
    """Predicts the request's own limit, an upper bound: the best estimate if tenants' past outputs predict nothing."""

    def predict(self, request: RequestView) -> float:
        """Returns `max_tokens`."""
        return float(request.max_tokens)

    def learn(self, request: RequestView, generated: int) -> None:
        """Does nothing."""


class TenantHistory:
    """Predicts the tenant's mean output so far, at most `max_tokens`; `max_tokens` itself for an unknown tenant."""

    _MEMORY = 50
    """Sequences after which earlier ones weigh about a third in the mean."""
    _MAX_TENANTS = 10_000

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def predict(self, request: RequestView) -> float:
        """Returns the smaller of the tenant's mean and `max_tokens`."""
        return min(float(request.max_tokens), self._mean.get(request.tenant, float("inf")))

    def learn(self, request: RequestView, generated: int) -> None:
        """Updates the tenant's mean. Beyond `_MAX_TENANTS`, forgets the tenant seen first."""
        mean = self._mean.get(request.tenant)
        if mean is None:
            if len(self._mean) >= self._MAX_TENANTS:
                del self._mean[next(iter(self._mean))]
            self._mean[request.tenant] = float(generated)
        else:
            self._mean[request.tenant] = mean + (generated - mean) / self._MEMORY


_BUILT_IN: dict[str, type[LengthEstimator]] = {"max_tokens": MaxTokens, "tenant_history": TenantHistory}


def available_estimators() -> list[str]:
    """Returns the names of all estimators, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def load_estimator(name: str) -> LengthEstimator:
    """Creates the estimator of this name. Raises ValueError, which lists the available ones."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            estimator: LengthEstimator = entry.load()()
            return estimator
    raise ValueError(f"length estimator {name!r} is not installed; available are: {', '.join(available_estimators())}")
