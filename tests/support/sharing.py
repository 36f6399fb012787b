"""A stack with one hash runner, for tests of prefix sharing between requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.scheduler.scheduler import Scheduler
from tests.support.in_process import Stack, Submitted

SIZE = 8
NO_EOS = 0.0
OUTPUT = 3


@dataclass
class Service:
    """A stack with one hash runner."""

    stack: Stack
    session: int

    @property
    def scheduler(self) -> Scheduler:
        return self.stack.engine.pool.schedulers[self.session]

    def advance(self, turns: int = 1) -> None:
        """Runs whole turns: everything sent is executed and its results are delivered."""
        for _ in range(turns):
            self.stack.whole_turn(self.session)

    def finish(self) -> None:
        for _ in range(5000):
            self.advance()
            if self.stack.engine.requests.idle:
                self.stack.step()
                return
        raise AssertionError("never idle")

    def cached(self, request: Submitted, index: int = 0) -> int:
        """Returns a finished choice's tokens that came from the cache, after checking its stream."""
        assert request.first_sequence_id is not None and request.refused is None
        stream = self.stack.streams[request.first_sequence_id + index]
        assert stream.end is not None and stream.end.reason == FinishReason.LENGTH
        assert stream.tokens == request.expected(index, NO_EOS)
        return stream.end.cached_tokens


def service(slots: int = 4, num_blocks: int = 64, step_tokens: int = 256, **settings: object) -> Service:
    stack = Stack(**settings)
    backend = HashBackend(
        num_slots=slots,
        block_size=SIZE,
        num_blocks=num_blocks,
        max_step_tokens=step_tokens,
        context_length=1024,
        eos_probability=NO_EOS,
    )
    session = stack.add_runner(backend)
    stack.step()
    return Service(stack, session)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)
