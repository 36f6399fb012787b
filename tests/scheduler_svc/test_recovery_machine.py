"""The state model of recovery: results, deaths, returns, leaves, cancels, swaps and new schedulers, in any order.

The real engine, schedulers and hash runners, under the rules of `EngineMachine` and those below. What holds in every
state: `check_roster` after each plan, no stream gets a token that differs from, repeats or skips what its slow twin
says. What holds in the end: every stream is whole or was cancelled, and pools, queues and quarantine are empty.

    ROSTER_TEST_EXAMPLES=5000 pytest tests/scheduler_svc/test_recovery_machine.py

runs more of it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from runner_svc.runner import Runner
from scheduler_svc.runner_events import Loss
from tests.scheduler_svc.test_engine_machine import EngineMachine

NUM_EXAMPLES = int(os.environ.get("ROSTER_TEST_EXAMPLES", "40"))


class RecoveryMachine(EngineMachine):
    """Stop strings are left out: it is the front that finds them, again after a restart."""

    cut = None  # type: ignore[assignment]

    def _some_runner(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.stack.runners.runners)))

    @rule()
    def restart(self) -> None:
        """The scheduler dies; its successor takes over, and the clients attach."""
        self.stack.restart_scheduler()

    @precondition(lambda self: self.stack.runners.runners)
    @rule(data=st.data())
    def restart_without_a_runner(self, data: st.DataObject) -> None:
        """One runner comes later than the others, when its sequences may have begun again."""
        session = self._some_runner(data)
        late = self.stack.runners.runners[session]
        self.stack.runners.dismiss(session)
        self.stack.restart_scheduler()
        for _ in range(data.draw(st.integers(0, 6))):
            self.stack.step()
            for other in list(self.stack.runners.runners):
                self.stack.runners.execute(other)
                self.stack.runners.deliver(other)
        self._return(late, session, holds=True)

    @precondition(lambda self: self.stack.runners.runners)
    @rule(data=st.data())
    def network_cut(self, data: st.DataObject) -> None:
        """A runner is given up, and comes back as it was."""
        session = self._some_runner(data)
        runner = self.stack.runners.kill(session, Loss.SILENT)
        self.cuts += 1
        self.stack.step()
        self._return(runner, session, holds=False)

    def _return(self, runner: Runner, former: int, holds: bool) -> None:
        self.stack._sessions += 1
        self.stack.runners.connect(self.stack._sessions, runner, former, holds)

    @precondition(lambda self: self.stack.runners.runners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A runner says goodbye and finishes what it has; another one comes."""
        self.stack.runners.leave(self._some_runner(data))
        self._add_runner()


RecoveryMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
TestRecovery = RecoveryMachine.TestCase
