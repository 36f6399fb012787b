"""A runner behind its socket, and a handwritten scheduler whose sequences are admitted, decode and are released."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend
from runner_svc.link.plan_socket import PlanSocket
from tests.support.fake_scheduler import FakeScheduler
from tests.support.plans import AWAIT, SAMPLE, admission, masks, plan, sampling

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE = 3, 9, 8
_PROMPT, _STEPS, _DEPTH = 6, 12, 2
PLANS = _STEPS + 2
"""Plans of one generation."""


class LinkedRunner:
    """The scheduler's side of a session."""

    def __init__(self, scheduler: FakeScheduler, vocab_size: int) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._sent = 0
        self._received = 0

    def generations(self, count: int) -> None:
        """Runs three sequences `count` times, one with log-probabilities; the last token of one is masked."""
        for _ in range(count):
            self._send(_opening(release=self._sent > 0))
            for position in range(_PROMPT, _PROMPT + _STEPS):
                self._send(plan(extents=[(slot, position, 1, SAMPLE) for slot in range(NUM_SLOTS)]))
            flags = (SAMPLE, SAMPLE, AWAIT)
            self._send(plan(extents=[(slot, _PROMPT + _STEPS, 1, flag) for slot, flag in enumerate(flags)]))
            self._scheduler.send(number=self._sent, masks=masks(self._vocab_size, {2: [5, 7]}))
            self._receive(ahead=0)

    def _send(self, one: plan_pb2.Plan) -> None:
        self._sent += 1
        self._scheduler.send(number=self._sent, plan=one)
        self._receive(ahead=_DEPTH - 1)

    def _receive(self, ahead: int) -> None:
        while self._received < self._sent - ahead:
            message = self._scheduler.expect("result")
            self._received += 1
            assert message.number == self._received
            assert message.result.token_counts == b"\1" * NUM_SLOTS


def _opening(release: bool) -> plan_pb2.Plan:
    slots = range(NUM_SLOTS)
    return plan(
        releases=slots if release else (),
        admissions=[
            admission(
                slot,
                [slot + 1] * _PROMPT,
                range(1 + 3 * slot, 4 + 3 * slot),
                sampling=sampling(logprobs=2, prompt_logprobs=2) if slot == 1 else sampling(),
            )
            for slot in slots
        ],
        extents=[(slot, 0, _PROMPT, SAMPLE) for slot in slots],
    )


@contextmanager
def linked_runner(
    backend: Backend, make_link: Callable[[Runner, str], PlanSocket] = PlanSocket
) -> Iterator[LinkedRunner]:
    """Opens a session with a runner whose socket serves in a thread; the backend must have the sizes above."""
    with tempfile.TemporaryDirectory() as folder:
        scheduler = FakeScheduler(f"ipc://{folder}/link")
        link = make_link(Runner(backend), scheduler.endpoint)
        thread = threading.Thread(target=link.run)
        thread.start()
        try:
            scheduler.welcome()
            yield LinkedRunner(scheduler, backend.model.vocab_size)
        finally:
            link.stop()
            thread.join()
            scheduler.close()
