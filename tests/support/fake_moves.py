"""The runners' part in moves, without sockets: grants and pulls between hash runners, slow and lossy as a test likes.

Blocks are copied one at a time, each at a moment of its own, so that a block that is written too early or too late is a
wrong token later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import GotMoved

GRANTED, DONE, FAILED = (
    plan_pb2.MOVE_OUTCOME_GRANTED,
    plan_pb2.MOVE_OUTCOME_DONE,
    plan_pb2.MOVE_OUTCOME_FAILED,
)


@dataclass
class Copy:
    """A pull under way."""

    session: int
    pull: plan_pb2.Pull
    source: str
    """Id of the runner that is read."""
    left: list[tuple[int, int]]
    """Pairs of source and target block that are still to be copied."""


@dataclass
class FakeMoves:
    """Grants and pulls of all runners. A draw of `rng` decides each fate; without one, all is done at once."""

    runners: dict[int, Runner]
    """The live sessions, as the link keeps them."""
    rng: random.Random | None = None
    lost: float = 0.1
    """Share of messages that are lost."""
    failing: float = 0.05
    """Share of pulls that fail, with some blocks written."""
    grants: dict[str, dict[bytes, set[int]]] = field(default_factory=dict)
    """Granted blocks by runner id and key."""
    processes: dict[str, Runner] = field(default_factory=dict)
    """Living processes by runner id, whether or not the scheduler is connected to them."""
    inbox: list[tuple[int, plan_pb2.ToRunner]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    ended: dict[bytes, plan_pb2.Moved] = field(default_factory=dict)
    dismissed: list[int] = field(default_factory=list)
    stalled: bool = False
    """Whether copies make no progress."""
    unreachable: bool = False
    """Whether every pull fails at once."""
    num_copied: int = 0
    """Blocks copied so far."""

    def hello(self, runner: Runner, hello: plan_pb2.Hello) -> None:
        """Makes the runner take part."""
        self.processes[runner.runner_id] = runner
        self.grants[runner.runner_id] = {}
        hello.move_endpoint, hello.kv_format = f"inproc://{runner.runner_id}", "hash"

    def handed_over(self, runners: dict[int, Runner]) -> FakeMoves:
        """Returns the same processes in the sessions of another scheduler, which are to become `runners`."""
        return FakeMoves(runners, self.rng, self.lost, self.failing, self.grants, self.processes)

    def send(self, session: int, message: plan_pb2.ToRunner) -> None:
        """Takes a message of the scheduler."""
        if message.HasField("dismissal"):
            self.dismissed.append(session)
        if session in self.runners and not self._draws(self.lost):
            self.inbox.append((session, plan_pb2.ToRunner.FromString(message.SerializeToString())))

    def die(self, runner: Runner) -> None:
        """Ends a process: nothing is read from it any more."""
        self.processes.pop(runner.runner_id, None)

    def progress(self) -> list[GotMoved]:
        """Goes on for a while; returns the answers that reach the scheduler."""
        answers: list[GotMoved] = []
        inbox, self.inbox = self.inbox, []
        for session, message in inbox:
            if session not in self.runners:
                continue
            if self._draws(0.3):  # it comes later, and maybe behind others
                self.inbox.append((session, message))
                continue
            answers += self._take(session, message)
        for copy in [] if self.stalled else list(self.copies):
            answers += self._copy(copy)
        return [answer for answer in answers if not self._draws(self.lost)]

    def _draws(self, share: float) -> bool:
        return self.rng is not None and self.rng.random() < share

    def _take(self, session: int, message: plan_pb2.ToRunner) -> list[GotMoved]:
        kind, runner = message.WhichOneof("body"), self.runners[session]
        grants = self.grants[runner.runner_id]
        if kind == "grant":
            grants[message.grant.key] = set(np.frombuffer(message.grant.blocks, "<i4").tolist())
            return [GotMoved(session, plan_pb2.Moved(key=message.grant.key, outcome=GRANTED))]
        if kind == "revoke":
            grants.pop(message.revoke.key, None)
        elif kind == "pull":
            pull = message.pull
            if pull.key in self.ended:
                return [GotMoved(session, self.ended[pull.key])]
            if all(copy.pull.key != pull.key for copy in self.copies):
                pairs = zip(
                    np.frombuffer(pull.sources, "<i4").tolist(),
                    np.frombuffer(pull.targets, "<i4").tolist(),
                    strict=True,
                )
                self.copies.append(Copy(session, pull, pull.endpoint.removeprefix("inproc://"), list(pairs)))
        return []

    def _copy(self, copy: Copy) -> list[GotMoved]:
        """Copies some blocks of a pull; returns its answer once it has ended."""
        target = self.runners.get(copy.session)
        if target is None:  # its session is over
            self.copies.remove(copy)
            return []
        source = self.processes.get(copy.source)
        granted = self.grants[copy.source].get(copy.pull.key, set())
        if (
            self.unreachable
            or source is None
            or not granted.issuperset(block for block, _ in copy.left)
            or self._draws(self.failing)
        ):
            return self._answer(copy, plan_pb2.Moved(key=copy.pull.key, outcome=FAILED, reason="the test says so"))
        for _ in range(len(copy.left) if self.rng is None else self.rng.randint(0, 3)):
            if not copy.left:
                break
            index = 0 if self.rng is None else self.rng.randrange(len(copy.left))
            block, place = copy.left.pop(index)
            cache_of(target)[place] = cache_of(source)[block]
            backend_of(target).forget_drafts(np.array([place], np.int32))
            self.num_copied += 1
        if copy.left:
            return []
        size = 128 * (len(copy.pull.targets) // 4)
        return self._answer(
            copy, plan_pb2.Moved(key=copy.pull.key, outcome=DONE, num_bytes=size, duration_us=10, transport="tcp")
        )

    def _answer(self, copy: Copy, moved: plan_pb2.Moved) -> list[GotMoved]:
        self.copies.remove(copy)
        self.ended[copy.pull.key] = moved
        return [GotMoved(copy.session, moved)]


def cache_of(runner: Runner) -> np.ndarray:
    """Returns the KV of a hash runner, [blocks, block_size]."""
    return backend_of(runner)._kv


def backend_of(runner: Runner) -> HashBackend:
    """Returns the backend of a hash runner."""
    assert isinstance(runner._backend, HashBackend)
    return runner._backend
