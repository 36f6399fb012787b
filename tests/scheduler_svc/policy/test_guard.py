"""Every function of a policy may fail in every way: the guard's answer is valid, and the failure is counted."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policy import (
    Budget,
    Policy,
    PolicyGuard,
    PolicyParameters,
    RequestView,
    RunnerView,
    RunningView,
    StepReport,
    WaitingView,
)
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import TraceRequest
from scheduler_svc.step_times.step_time_model import StepTimeModel
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost

REQUEST = RequestView("r", "t", 1.5, 0, 10, 20, 1)


def running(number: int) -> RunningView:
    return RunningView(number, REQUEST, ((float(number),), number), 10, 2, 1)


def waiting(number: int) -> WaitingView:
    return WaitingView(number, REQUEST, ((float(number),), number), 10, 0, 0.0)


def runner(name: str, role: str, free_slots: int) -> RunnerView:
    return RunnerView(name, role, free_slots, 8, 90, 100, 0, 0, 0, StepTimeModel())


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError


def fail(*arguments: Any) -> Any:
    sys.exit("a policy has no business here")


ANSWERS: list[Callable[..., Any]] = [
    fail,
    lambda *arguments: Unshowable(),
    lambda *arguments: "nonsense",
    lambda *arguments: [waiting(1), waiting(1)],
    lambda *arguments: float("nan"),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_does_not_fit_is_replaced(answer: Callable[..., Any]) -> None:
    names = ("tenant_key", "rerank", "displace", "victim", "decode_on")
    broken = type("Broken", (Policy,), {name: staticmethod(answer) for name in names})
    guard = PolicyGuard(broken(PolicyParameters()))
    ledger, head = Ledger(), [waiting(1), waiting(2)]
    ledger.lift("t", 2.5)
    assert guard.tenant_key("t", ledger) == 2.5
    assert list(guard.rerank(head)) == head
    assert guard.displace([running(2), running(3)], waiting(1)) is None
    assert guard.victim([running(2), running(3)], running(1)) == running(3)
    runners = [runner("a", "both", 9), runner("b", "decode", 1), runner("c", "decode", 2)]
    assert guard.decode_on(running(1), runners) is runners[2] and guard.decode_on(running(1), runners[:1]) is runners[0]
    assert guard.failures == 6
    assert guard.last_failure


def test_what_is_not_overridden_is_not_asked() -> None:
    guard = PolicyGuard(Policy(PolicyParameters()))
    assert not (guard.orders_tenants or guard.displaces or guard.observes or guard.rerank_window)
    assert not guard.chooses_decoders


class Chaotic(Policy):
    """Overrides every function; half of its answers are wrong."""

    name = "chaotic"
    rerank_window = 8

    def __init__(self) -> None:
        super().__init__(PolicyParameters())
        self.rng = random.Random(3)

    def _maybe(self, right: Any) -> Any:
        choice = self.rng.randrange(6)
        if choice == 0:
            raise RuntimeError("chaos")
        return (None, float("nan"), "x", right, right, right)[choice]

    def key(self, request: Any, ledger: Any) -> Any:
        return self._maybe(self.rng.random())

    def tenant_key(self, tenant: str, ledger: Any) -> Any:
        return self._maybe(self.rng.random())

    def budget(self, load: Any) -> Any:
        return self._maybe(
            Budget(self.rng.randrange(1, 300), self.rng.random() < 0.8, overflow=self.rng.randrange(100))
        )

    def rerank(self, head: Sequence[Any]) -> Any:
        return self._maybe(self.rng.sample(list(head), len(head)))

    def displace(self, running: Sequence[Any], candidate: Any) -> Any:
        return self._maybe(self.rng.choice(running) if self.rng.random() < 0.1 else None)

    def victim(self, running: Sequence[Any], candidate: Any) -> Any:
        return self._maybe(self.rng.choice(running))

    def observe(self, report: StepReport) -> None:
        self._maybe(None)


def test_every_request_gets_its_tokens_under_chaos() -> None:
    rng = random.Random(4)
    trace = merged(
        [
            TraceRequest(t, rng.randint(1, 400), rng.randint(1, 60), tenant=rng.choice("abc"))
            for t in poisson(rng, 12, 0, 8)
        ]
    )
    outcome = simulate(
        trace, Setup(round_cost(), policy=Chaotic(), kv_tokens=2000, prefix_sharing=True, check=True, step_tokens=256)
    )
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]
    assert outcome.counters.policy_failures > 100
    assert outcome.counters.preemptions > 0
