"""Named runners that fail, under one engine in one process, and requests that crash runners."""

from __future__ import annotations

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import Loss
from tests.support.in_process import Stack, Submitted

FATAL = 99
"""Token that causes `Hospital.fatal` on every runner."""


class Hospital:
    """Named runners in one process, on the stack's clock; a test decides the outcome of each one's next plan."""

    def __init__(self, *names: str, **settings: object) -> None:
        self.stack = Stack(**settings)
        self.engine = self.stack.engine
        self.sessions: dict[str, int] = {}
        self.ill: dict[str, Loss] = {}
        """Runners that are lost with every plan, with the kind of loss."""
        self.fatal: Loss | None = None
        """Loss that a plan with `FATAL` causes on any runner; None: no loss."""
        self.losses: list[str] = []
        self._num_sessions = 0
        for name in names:
            self.connect(name)
        self.stack.step()

    def connect(self, name: str, former: int = 0, block_size: int = 4) -> None:
        self._num_sessions += 1
        self.sessions[name] = self._num_sessions
        backend = HashBackend(num_slots=4, block_size=block_size, num_blocks=64, context_length=128, eos_probability=0)
        self.stack.runners.connect(self._num_sessions, Runner(backend, name), former)

    def lose(self, name: str, loss: Loss) -> None:
        """Loses the runner, which reconnects at once as a new process."""
        self.losses.append(name)
        self.stack.runners.kill(self.sessions[name], loss)
        self.connect(name)

    def turn(self) -> None:
        """Lets each runner execute one plan and advances time by 0.01 s."""
        self.stack.step()
        for name, session in list(self.sessions.items()):
            plans = self.stack.runners.plans.get(session)
            if not plans:
                continue
            is_fatal = any(FATAL in column(one.tokens) for one in plans[0][1].admissions)
            loss = self.ill.get(name) or (self.fatal if is_fatal else None)
            if loss is not None:
                self.lose(name, loss)
            else:
                self.stack.runners.execute(session)
                self.stack.runners.deliver(session)
        self.stack.now_s += 0.01

    def turns(self, seconds: float) -> None:
        until_at = self.stack.now_s + seconds
        while self.stack.now_s < until_at:
            self.turn()

    def run(self, most_s: float = 300.0) -> None:
        until_at = self.stack.now_s + most_s
        while not self.engine.requests.idle or self.stack.front.commands:
            assert self.stack.now_s < until_at, "requests never end"
            self.turn()
        self.stack.step()

    def submit(self, number: int = 0, tokens: int = 6, **fields: object) -> Submitted:
        return self.stack.submit([number % 70, 3, 5], tokens, **fields)

    def fatal_request(self) -> Submitted:
        return self.stack.submit([1, FATAL, 2], 8)


def column(packed: bytes) -> set[int]:
    return set(memoryview(packed).cast("i").tolist())


def served(*requests: Submitted) -> bool:
    return all(r.refused is None and r.streams[0].tokens == r.expected(0, 0.0) for r in requests)
