"""A stack with one hash runner, for tests of prefix sharing between requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from runner_svc.tiers.kv_copier import Direction
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.scheduler.scheduler import Scheduler
from tests.support.in_process import Stack, Submitted
from tests.support.stepped_copier import SteppedCopier

SIZE = 8
NO_EOS = 0.0
OUTPUT = 3


@dataclass
class Service:
    """A stack with one hash runner."""

    stack: Stack
    session: int
    copier: SteppedCopier | None = None
    """That of the runner's host pool, if it has one: it copies when the test says so."""

    @property
    def scheduler(self) -> Scheduler:
        return self.stack.engine.pool.schedulers[self.session]

    def advance(self, turns: int = 1) -> None:
        """Runs whole turns: everything sent is executed and its results are delivered."""
        for _ in range(turns):
            self.stack.whole_turn(self.session)

    def finish(self, copies: bool = True) -> None:
        """Runs turns until all is done, `copies` too."""
        for _ in range(5000):
            self.advance()
            if copies:
                self.copy()
            if self.stack.engine.requests.idle and not (copies and self.stack.is_copying):
                self.stack.step()
                return
        raise AssertionError("never idle")

    def copy(self) -> None:
        """Ends all copies of the host pool that have begun; the next results say so."""
        if self.copier is not None:
            for direction in Direction:
                self.copier.copy_all(direction)

    def cached(self, request: Submitted, index: int = 0) -> int:
        """Returns a finished choice's tokens that came from the cache, after checking its stream."""
        assert request.first_sequence_id is not None and request.refused is None
        stream = self.stack.streams[request.first_sequence_id + index]
        assert stream.end is not None and stream.end.reason == FinishReason.LENGTH
        assert stream.tokens == request.expected(index, NO_EOS)
        return stream.end.cached_tokens


def service(
    slots: int = 4, num_blocks: int = 64, step_tokens: int = 256, host_blocks: int = 0, **settings: object
) -> Service:
    """`host_blocks`: those of the runner's host pool; copies are late until the test ends them."""
    stack = Stack(**settings)
    backend = HashBackend(
        num_slots=slots,
        block_size=SIZE,
        num_blocks=num_blocks,
        max_step_tokens=step_tokens,
        context_length=1024,
        eos_probability=NO_EOS,
    )
    copier = SteppedCopier(backend.cache_regions, host_blocks) if host_blocks else None
    session = stack.connect(Runner(backend, copier=copier))
    stack.step()
    stack.step()  # takes in what the host pool has
    return Service(stack, session, copier)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)
