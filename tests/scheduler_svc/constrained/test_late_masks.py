"""Plan N + 1 is sent before the masks of plan N. In between, sequences of the waiting rows leave their slots, which
others take, with prompts that are computed in several chunks.

Whatever makes a sequence leave, its token is not written into the next one's prompt, and no KV computed from it is
shared; a sequence that resumes elsewhere keeps the token. Without the check before sampling, each of these cases gives
a wrong answer. Run on the hash backend, and on the CUDA backend's host code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.batch.batch_state import BatchState
from runner_svc.interface.backend import Backend
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.host_backend import host_backend
from tests.support.in_process import Stack, Submitted
from tests.support.tiny_models import KERNEL_SIZES, make_tiny_model

SIZES = {"block_size": 16, "max_step_tokens": 16}
FIRST = [5, 6, 7, 8, 9, 10, 11] * 5
"""Prompt of the waiting sequence: the position of its token is in the third chunk of the next one's prompt."""
NEXT = random.Random(2).choices(range(256), k=45)
LONG = 1000  # calls of the runner, a delay that does not end within a test


BETTER = (36, 4)
"""Prompt tokens, and generated tokens when the sequence arrives whose row must wait when a block is needed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", **KERNEL_SIZES["qwen3"])


@pytest.fixture(params=["hash", "host"])
def make(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Backend]:
    def hash_backend(num_slots: int = 1, num_blocks: int = 32) -> Backend:
        return HashBackend(num_slots=num_slots, num_blocks=num_blocks, eos_probability=0, **SIZES)

    def cuda_backend(num_slots: int = 1, num_blocks: int = 32) -> Backend:
        return host_backend(folder, num_slots=num_slots, num_blocks=num_blocks, **SIZES)

    return hash_backend if request.param == "hash" else cuda_backend


class Window:
    """A service whose runner has `num_slots` slots; masks are late from `opens` on."""

    def __init__(self, make: Callable[..., Backend], num_slots: int = 1, num_blocks: int = 32, **settings: object):
        self.make = make
        self.stack = Stack(depth=3, **settings)
        self.session = self.stack.add_runner(make(num_slots, num_blocks))
        self.stack.step()

    def submit(self, prompt: list[int], max_tokens: int = 6, *, tied: bool = False, **fields: object) -> Submitted:
        """Submits a greedy request; `tied`: its output must match a regular expression."""
        if tied:
            fields["grammar"] = grammar_text("regex", "[a-z]{40}")
        sampling = plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, stop_ids=pack([258]))
        return self.stack.submit(prompt, max_tokens, sampling=sampling, **fields)

    def turn(self) -> None:
        """Steps the engine; the runner takes one plan and sends the results that are done."""
        self.stack.step()
        self.stack.runners.execute(self.session)
        self.stack.runners.deliver(self.session)

    def opens(self, first: Submitted) -> None:
        """Runs until `first` has a token and a launched row that waits for its mask, which is held back."""
        for _ in range(40):
            self.stack.step()
            has_begun = bool(first.streams and first.streams[0].tokens)
            self.stack.runners.mask_delay = LONG if has_begun else 3
            self.stack.runners.execute(self.session)
            if has_begun and first in self.stack.awaiting() and self.runner_waits:
                return
            self.stack.runners.deliver(self.session)
        raise AssertionError("the case is not met")

    @property
    def runner_waits(self) -> bool:
        """Whether a launched row has no mask yet."""
        return any(plan.awaits_masks for plan in self.stack.runners.launched[self.session])

    def seats(self, *newcomers: Submitted) -> None:
        """Admits the newcomers, launches the planned parts of their prompts, and then delivers the masks."""
        for _ in range(6):
            self.stack.step()
            if all(self.is_seated(each) for each in newcomers):
                break
            self.stack.runners.execute(self.session)
            self.stack.runners.deliver(self.session)
        assert all(self.is_seated(each) for each in newcomers), "the case is not met"
        while self.stack.runners.plans[self.session]:
            self.stack.runners.execute(self.session)
        assert self.runner_waits, "the case is not met"
        self.stack.runners.mask_delay = 0
        for masks in self.stack.runners.masks[self.session]:
            masks.delay = 0

    def is_seated(self, request: Submitted) -> bool:
        scheduler = self.stack.engine.pool.schedulers[self.session]
        return request.first_sequence_id in [sequence.id for sequence in scheduler.table.running()]

    def ends(self) -> None:
        for _ in range(600):
            self.turn()
            if self.stack.engine.requests.idle:
                self.stack.step()
                return
        raise AssertionError("never idle")

    def alone(self, request: Submitted) -> list[int]:
        """Returns the request's tokens from a service without other requests."""
        fresh = Window(self.make)
        prompt = np.frombuffer(request.submit.prompt, "<i4").tolist()
        again = fresh.submit(prompt, request.submit.max_tokens, tied=bool(request.submit.grammar))
        fresh.ends()
        return again.streams[0].tokens

    def assert_right(self, *requests: Submitted) -> None:
        """Asserts that they are complete and correct, as is a further request that reuses the last one's prompt KV."""
        again = self.submit(np.frombuffer(requests[-1].submit.prompt, "<i4").tolist())
        self.ends()
        for request in (*requests, again):
            assert request.refused is None and request.streams[0].end is not None
            assert request.streams[0].end.reason == FinishReason.LENGTH
            assert request.streams[0].tokens == self.alone(request), f"request {request.handle} has a wrong answer"


def cancelled(make: Callable[..., Backend]) -> None:
    window = Window(make)
    first, following = window.submit(FIRST, 30, tied=True), window.submit(NEXT)
    window.opens(first)
    window.stack.front.put(cancel=engine_pb2.Cancel(handle=first.handle))
    window.seats(following)
    window.ends()
    assert first.streams[0].end.reason == FinishReason.CANCELLED
    window.assert_right(following)


def expired(make: Callable[..., Backend]) -> None:
    window = Window(make, early_refusal=False)
    first, following = window.submit(FIRST, 30, tied=True, timeout_ms=1000), window.submit(NEXT)
    window.opens(first)
    window.stack.now_s += 2
    window.seats(following)
    window.ends()
    assert first.streams[0].end.reason == FinishReason.DEADLINE
    window.assert_right(following)


def displaced(make: Callable[..., Backend]) -> None:
    """It resumes, with the token of its late mask, once the other one has ended."""
    window = Window(make, num_slots=2, policy="priority")
    window.submit([50, 51, 52], 30, priority=1)  # if nothing else runs, a plan waits for the mask anyway
    first = window.submit(FIRST, 12, tied=True)
    window.opens(first)
    following = window.submit(NEXT, priority=3)
    window.seats(following)
    assert window.stack.engine.pool.schedulers[window.session].preemptions == 1
    window.ends()
    window.assert_right(first, following)


def preempted(make: Callable[..., Backend]) -> None:
    """A sequence of higher rank needs its block, and ends: there is room for two more."""
    window = Window(make, num_slots=2, num_blocks=6, policy="priority")
    better = window.submit(list(range(40, 40 + BETTER[0])), 40, priority=5)
    for _ in range(60):
        if better.streams and len(better.streams[0].tokens) == BETTER[1]:
            break
        window.turn()
    first = window.submit(FIRST, 12, tied=True)
    window.opens(first)
    scheduler = window.stack.engine.pool.schedulers[window.session]
    for _ in range(3):
        if scheduler.preemptions:
            break
        window.stack.step()
        window.stack.runners.execute(window.session)
        window.stack.runners.deliver(window.session)
    assert scheduler.preemptions == 1 and window.runner_waits, "the case is not met"
    window.stack.front.put(cancel=engine_pb2.Cancel(handle=better.handle))
    newcomers = [window.submit([80, 81], 3, priority=4), window.submit(NEXT, 3, priority=3)]
    window.seats(*newcomers)
    window.ends()
    window.assert_right(first, *newcomers)


def drained(make: Callable[..., Backend]) -> None:
    """The service drains: meanwhile one of its requests expires, and one that waits is admitted."""
    window = Window(make, early_refusal=False)
    first, following = window.submit(FIRST, 30, tied=True, timeout_ms=1000), window.submit(NEXT)
    window.opens(first)
    window.stack.front.put(drain=engine_pb2.Drain(handle=90))
    window.stack.now_s += 2
    window.seats(following)
    refused = window.submit([1, 2])
    window.ends()
    assert refused.refused is not None, "the drain has not begun"
    assert following.streams[0].tokens == window.alone(following), "a wrong answer"


CASES = [cancelled, expired, displaced, preempted, drained]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_late_token_is_in_no_other_answer(case: Callable[..., None], make: Callable[..., Backend]) -> None:
    case(make)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_unchecked_it_would_be(
    case: Callable[..., None], make: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchState, "outlived", lambda self, applied, rows: np.zeros(len(rows), np.bool_))
    with pytest.raises(AssertionError, match="a wrong answer"):
        case(make)
