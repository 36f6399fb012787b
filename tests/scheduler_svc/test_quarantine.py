"""A request that kills runners is found and refused; whoever ran beside it never notices."""

from __future__ import annotations

import random

import grpc
import pytest

from protos import engine_pb2
from runner_svc.hash_model import HashBackend, Poison
from runner_svc.plan_columns import PlanFault
from runner_svc.runner import Runner
from scheduler_svc.runner_events import Loss
from tests.support.in_process import Stack, Submitted

POISON = 77
NO_EOS = 0.0


class Ward:
    """Runners that poison kills and that come back, under one engine."""

    def __init__(self, runners: int, slots: int = 8, **settings: object) -> None:
        self.stack = Stack(**settings)
        self.slots = slots
        self.crashes = 0
        for _ in range(runners):
            self.add_runner()
        self.stack.step()

    def add_runner(self) -> None:
        backend = HashBackend(
            num_slots=self.slots,
            block_size=4,
            num_blocks=400,
            max_step_tokens=64,
            context_length=128,
            eos_probability=NO_EOS,
            poison=Poison(POISON, "error"),
        )
        self.stack.add_runner(backend)

    def turn(self, loss: Loss = Loss.FAULT) -> None:
        self.stack.step()
        for session in list(self.stack.runners.runners):
            try:
                self.stack.runners.execute(session)
            except PlanFault:
                self.crashes += 1
                self.stack.runners.kill(session, loss)
                self.add_runner()
                continue
            self.stack.runners.deliver(session)

    def run(self) -> None:
        for _ in range(5000):
            self.turn()
            if self.stack.engine.idle and not self.stack.front.commands and not self.stack.runners.events:
                self.stack.step()
                return
        raise AssertionError("never idle")


def clean_prompt(rng: random.Random, max_tokens: int) -> list[int]:
    """A prompt that never meets the poison, which any prompt may sample."""
    while True:
        prompt = [rng.randrange(70) for _ in range(rng.randrange(1, 20))]
        submitted = Submitted(0, Stack().submit(prompt, max_tokens).submit)
        if POISON not in submitted.expected(0, NO_EOS):
            return prompt


def poisoned_prompt(rng: random.Random, max_tokens: int, at_least: int) -> list[int]:
    """One that samples it after some tokens."""
    while True:
        prompt = [rng.randrange(70) for _ in range(rng.randrange(1, 20))]
        expected = Submitted(0, Stack().submit(prompt, max_tokens).submit).expected(0, NO_EOS)
        if POISON in expected[at_least:-1] and POISON not in expected[:at_least]:
            return prompt


@pytest.mark.parametrize("runners", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_only_the_poison_is_refused(seed: int, runners: int) -> None:
    rng = random.Random(seed)
    ward = Ward(runners, prefix_sharing=bool(seed % 2))
    neighbours = [ward.stack.submit(clean_prompt(rng, 30), 30, n=rng.choice([1, 2])) for _ in range(20)]
    ward.stack.step()
    poison = [ward.stack.submit([1, POISON, 2], 20), ward.stack.submit(poisoned_prompt(rng, 60, 5), 60)]
    late = [ward.stack.submit(clean_prompt(rng, 30), 30) for _ in range(10)]
    ward.run()
    for request in poison:
        assert request.refused is not None and request.refused.code == grpc.StatusCode.INTERNAL.value[0]
        (stream,) = request.streams
        expected = request.expected(0, NO_EOS)
        assert stream.tokens == expected[: len(stream.tokens)]
    assert len(poison[1].streams[0].tokens) >= 5, "what it got before stays valid"
    for request in neighbours + late:
        assert request.refused is None
        for index, stream in enumerate(request.streams):
            assert stream.tokens == request.expected(index, NO_EOS)
    assert ward.crashes <= 16, ward.crashes
    assert not ward.stack.engine.quarantine.active
    ward.stack.assert_clean()


def test_crashes_that_nobody_caused_cost_nobody_anything() -> None:
    """Every runner dies many times, whatever it runs."""
    rng = random.Random(5)
    ward = Ward(2)
    requests = [ward.stack.submit(clean_prompt(rng, 40), 40) for _ in range(30)]
    for turn in range(2000):
        ward.turn()
        if turn % 9 == 0 and not ward.stack.engine.idle and turn < 300:
            ward.stack.runners.kill(
                rng.choice(list(ward.stack.runners.runners)), rng.choice([Loss.GONE, Loss.REPLACED])
            )
            ward.add_runner()
        if turn > 2 and ward.stack.engine.idle:
            break
    ward.stack.step()
    refused = [request for request in requests if request.refused is not None]
    # A crash in the very moment of a trial of one convicts it: with crashes this dense that is luck.
    assert len(refused) <= 3
    for request in requests:
        if request not in refused:
            assert request.streams[0].tokens == request.expected(0, NO_EOS)
    ward.stack.assert_clean()


def test_a_process_that_comes_back_absolves() -> None:
    """The network was cut, twice: nobody is tried for it."""
    stack = Stack()
    runner = Runner(HashBackend(num_slots=4, block_size=4, num_blocks=64, context_length=128, eos_probability=NO_EOS))
    session = 1
    stack.runners.connect(session, runner)
    request = stack.submit([1, 2, 3], 60)
    for _ in range(4):
        for _ in range(4):
            stack.step()
            stack.runners.execute(session)
            stack.runners.deliver(session)
        stack.step()
        stack.runners.kill(session, Loss.SILENT)
        stack.step()
        stack.runners.connect(session + 1, runner, former=session)
        session += 1
        stack.step()
        assert not stack.engine.quarantine.active
        assert all(live.strikes == 0 for live in stack.engine.book.live())
    while not stack.engine.idle:
        stack.step()
        stack.runners.execute(session)
        stack.runners.deliver(session)
    stack.step()
    assert request.streams[0].tokens == request.expected(0, NO_EOS)


def test_who_is_held_can_be_cancelled() -> None:

    ward = Ward(1)
    suspects = [ward.stack.submit([number, POISON], 20) for number in range(6)]
    for _ in range(200):
        ward.turn()
        if ward.stack.engine.quarantine.active:
            break
    assert ward.stack.engine.quarantine.num_waiting > 0
    for request in suspects:
        ward.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    ward.stack.step()
    assert ward.stack.engine.idle and ward.stack.engine.quarantine.num_waiting == 0
    ward.run()
    assert not ward.stack.engine.quarantine.active
    ward.stack.assert_clean()
