"""State machine test of recovery: results, deaths, returns, leaves, cancels, swaps and new schedulers, in any order.

Runs the real engine, schedulers and hash runners under the rules of `EngineMachine` and those below. Invariants in
every state: `check_scheduler` passes after each plan, and no stream gets a token that differs from, repeats or skips
its slow twin's. At the end every stream is complete or was cancelled, and pools, queues and quarantine are empty.

    ROSTER_TEST_EXAMPLES=5000 pytest tests/scheduler_svc/failure/test_recovery_machine.py

runs more examples.
"""

from __future__ import annotations

import os
import random

import grpc
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import Fenced, Loss
from scheduler_svc.link.terms import Term
from tests.scheduler_svc.engine.test_engine_machine import DICE, EOS_PROBABILITY, EngineMachine
from tests.support.mask_handles import dies_once
from tests.support.thoroughness import count

NUM_EXAMPLES = int(os.environ.get("ROSTER_TEST_EXAMPLES", count(40, in_ci=11)))


CRASHES = [Loss.FAULT, Loss.MEMORY, Loss.HUNG, Loss.REPLACED]


class RecoveryMachine(EngineMachine):
    """The machine. Stop strings are omitted, because the front finds them, again after a restart."""

    cut = None  # type: ignore[assignment]

    def _some_runner(self, rng: random.Random) -> int:
        return rng.choice(sorted(self.stack.runners.runners))

    @rule()
    def restart(self) -> None:
        """Kills the scheduler; its successor takes over, and the clients attach."""
        self.stack.restart_scheduler()

    @precondition(lambda self: self.stack.runners.runners)
    @rule(rng=DICE)
    def restart_without_a_runner(self, rng: random.Random) -> None:
        """Restarts the scheduler; one runner joins after the others, when its sequences may have started again."""
        session = self._some_runner(rng)
        late = self.stack.runners.runners[session]
        self.stack.runners.dismiss(session)
        self.stack.restart_scheduler()
        for _ in range(rng.randint(0, 6)):
            self.stack.step()
            for other in list(self.stack.runners.runners):
                self.stack.runners.execute(other)
                self.stack.runners.deliver(other)
        self._return(late, session, holds=True)

    @precondition(lambda self: self.stack.runners.runners)
    @rule(rng=DICE)
    def network_cut(self, rng: random.Random) -> None:
        """Ends a runner's session; the runner comes back unchanged."""
        session = self._some_runner(rng)
        runner = self.stack.runners.kill(session, Loss.SILENT)
        num_convicted = self._num_convicted()
        self.stack.step()
        if self._num_convicted() > num_convicted:
            self.kills += 1  # refused before the process was back: the loss that causes a refusal is never discounted
        else:
            self.cuts += 1
        self._return(runner, session, holds=False)

    def _num_convicted(self) -> int:
        refusals = [request.refused for request in self.stack.requests.values() if request.refused is not None]
        return sum(refused.code == grpc.StatusCode.INTERNAL.value[0] for refused in refusals)

    @precondition(lambda self: self.stack.runners.runners)
    @rule(rng=DICE, loss=st.sampled_from(CRASHES))
    def crash(self, rng: random.Random, loss: Loss) -> None:
        """Loses a runner in a way that counts as evidence; a new process joins."""
        self.stack.runners.kill(self._some_runner(rng), loss)
        self.crashes += 1
        self._add_runner()

    @precondition(lambda self: self.stack.runners.runners)
    @rule(rng=DICE, plans=st.integers(1, 5))
    def fall_ill(self, rng: random.Random, plans: int) -> None:
        """Lets a runner answer its next plans, including probes, with a fault each, and recover then.

        However long that takes, it costs a request at most one loss: after it the runner computes probes only.
        """
        runner = self.stack.runners.runners[self._some_runner(rng)]
        if not self.stack.runners.ill.get(runner):
            self.spells += 1
        self.stack.runners.ill[runner] = plans

    @precondition(lambda self: any(self.stack.runners.results.values()))
    @rule(rng=DICE, column=st.sampled_from(["tokens", "statuses", "token_counts"]))
    def truncated(self, rng: random.Random, column: str) -> None:
        """Truncates a result in transit: the session ends, and the runner begins another."""
        runners = self.stack.runners
        session = rng.choice(sorted(session for session, queue in runners.results.items() if queue))
        runner = runners.runners[session]
        if runners.garble(session, column):
            self.stack.step()
            assert session not in runners.runners
            self.crashes += 1
            self._return(runner, session, holds=False)

    @precondition(lambda self: any(self.stack.runners.results.values()))
    @rule(rng=DICE)
    def doubled(self, rng: random.Random) -> None:
        """Delivers a result twice."""
        runners = self.stack.runners
        session = rng.choice(sorted(session for session, queue in runners.results.items() if queue))
        runners.deliver(session)
        runners.events.append(runners.events[-1])

    @rule(role=st.sampled_from(["grammars", "masks"]), after=st.integers(0, 5))
    def mask_process_dies(self, role: str, after: int) -> None:
        """Kills a mask process at one of the next frames."""
        self.stack.fate = dies_once(role, after)

    @rule(rng=DICE, sees_results=st.booleans())
    def wakes_after_its_successor_took_over(self, rng: random.Random, sees_results: bool) -> None:
        """Stops a scheduler until another has taken over: what it sends after it wakes is correct, then it ends."""
        former = self.stack.succeed()
        for session in list(former.runners.results) if sees_results else ():
            while former.runners.deliver(session):
                pass
        for _ in range(rng.randint(0, 2)):
            former.step()
        former.runners.events.append(Fenced(Term(2)))
        former.step()
        num_plans = former.engine.requests.totals.plans
        former.step()
        assert (
            former.engine.lifecycle.fenced
            and former.engine.requests.idle
            and former.engine.requests.totals.plans == num_plans
        )
        for request in former.requests.values():
            for index, stream in enumerate(request.streams):
                expected = request.expected(index, EOS_PROBABILITY)[len(request.submit.received) // 4 :]
                assert stream.tokens == expected[: len(stream.tokens)]
            if request.first_sequence_id in former.streams and not former.is_attaching(request):
                assert all(stream.end is not None for stream in request.streams)

    def _return(self, runner: Runner, former: int, holds: bool) -> None:
        self.stack._sessions += 1
        self.stack.runners.connect(self.stack._sessions, runner, former, holds)

    @precondition(lambda self: self.stack.runners.runners)
    @rule(rng=DICE)
    def leave(self, rng: random.Random) -> None:
        """Lets a runner leave after it has finished its plans; another one joins."""
        self.stack.runners.leave(self._some_runner(rng))
        self._add_runner()


RecoveryMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
TestRecovery = RecoveryMachine.TestCase
