"""Hypothesis drives the engine: admit, cancel, cut, preempt, expire, kill, in whatever order, with late results."""

from __future__ import annotations

import grpc
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from protos import engine_pb2, plan_pb2
from runner_svc.byte_tokenizer import IM_END_ID
from runner_svc.hash_model import HashBackend
from scheduler_svc.plan_draft import pack
from scheduler_svc.policy import available_policies, load_policy
from scheduler_svc.sequence import FinishReason
from scheduler_svc.suspicion import LONE_LOSSES, PARDONS, STRIKES
from tests.support.in_process import Stack, Submitted

EOS_PROBABILITY = 1 / 24
BLOCK_SIZE = 4
NUM_BLOCKS = 14
STEM = [0, 1, 2, 3, 3, 2, 1, 0] * 4
"""What many prompts begin with, so that prefixes are hit, awaited and evicted."""


class EngineMachine(RuleBasedStateMachine):
    """`check_roster` runs after every plan (settings.check); tokens and ends are compared when all is done."""

    @initialize(
        depth=st.integers(1, 3),
        policy=st.sampled_from(available_policies()),
        sharing=st.sampled_from([True, True, False]),
        isolated=st.booleans(),
        runners=st.integers(1, 2),
    )
    def start(self, depth: int, policy: str, sharing: bool, isolated: bool, runners: int) -> None:
        self.stack = Stack(depth=depth, policy=policy, prefix_sharing=sharing, isolate_tenants=isolated)
        self.cancelled: set[int] = set()
        self.kills = self.cuts = 0
        for _ in range(runners):
            self._add_runner()
        self.stack.step()

    def _add_runner(self) -> None:
        backend = HashBackend(
            num_slots=3,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_step_tokens=10,
            context_length=128,
            eos_probability=EOS_PROBABILITY,
        )
        self.stack.add_runner(backend)

    @rule(
        prompt=st.one_of(
            st.lists(st.integers(0, 3), min_size=1, max_size=30),
            st.builds(lambda length, last: [*STEM[: length - 1], last], st.integers(1, 30), st.integers(0, 3)),
        ),
        max_tokens=st.integers(1, 26),
        n=st.integers(1, 2),
        temperature=st.sampled_from([0.0, 1.0]),
        timeout_ms=st.one_of(st.none(), st.integers(1, 3000)),
        keep_ms=st.sampled_from([0, 0, 1500]),
        seed=st.integers(0, 9),
        cache_salt=st.sampled_from(["", "", "salt"]),
        tenant=st.sampled_from(["", "a"]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        temperature: float,
        timeout_ms: int | None,
        keep_ms: int,
        seed: int,
        cache_salt: str,
        tenant: str,
    ) -> None:
        sampling = plan_pb2.Sampling(
            temperature=temperature, top_p=1, repetition_penalty=1, stop_ids=pack([IM_END_ID, 7, 8, 9, 10, 11])
        )
        fields: dict[str, object] = {"cache_salt": cache_salt, "tenant": tenant, "keep_ms": keep_ms}
        if timeout_ms is not None:
            fields["timeout_ms"] = timeout_ms
        self.stack.submit(prompt, max_tokens, n=n, seed=seed, sampling=sampling, **fields)

    @rule()
    def step(self) -> None:
        self.stack.step()

    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        if self.stack.runners.runners:
            self.stack.runners.execute(data.draw(st.sampled_from(sorted(self.stack.runners.runners))))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if self.stack.runners.runners:
            self.stack.runners.deliver(data.draw(st.sampled_from(sorted(self.stack.runners.runners))))

    @rule(data=st.data())
    def turns(self, data: st.DataObject) -> None:
        rng = data.draw(st.randoms(use_true_random=False))
        for _ in range(12):
            self.stack.turn(rng)

    @precondition(lambda self: self.stack.requests)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "disconnect"]))
    def cancel(self, data: st.DataObject, how: str) -> None:
        handle = data.draw(st.sampled_from(sorted(self.stack.requests)))
        self.cancelled.add(handle)
        message = engine_pb2.Cancel(handle=handle) if how == "cancel" else engine_pb2.Disconnect(handle=handle)
        self.stack.front.put(**{how: message})

    @precondition(lambda self: self.stack.streams)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.stack.streams)))
        keep = data.draw(st.integers(0, len(self.stack.streams[sequence_id].tokens)))
        self.cancelled.update(
            request.handle
            for request in self.stack.requests.values()
            if request.first_sequence_id is not None
            and request.first_sequence_id <= sequence_id < request.first_sequence_id + request.submit.n
        )
        self.stack.front.put(cut=engine_pb2.Cut(sequence_id=sequence_id, num_tokens=keep, stop_string="x"))

    @rule(policy=st.sampled_from(available_policies()))
    def swap_policy(self, policy: str) -> None:
        self.stack.engine.change_policy(load_policy(policy, {}))

    @rule(seconds=st.floats(0.1, 2))
    def time_passes(self, seconds: float) -> None:
        self.stack.now_s += seconds

    @precondition(lambda self: self.stack.runners.runners)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.stack.runners.kill(data.draw(st.sampled_from(sorted(self.stack.runners.runners))))
        self.kills += 1
        self._add_runner()

    def _compare(self, request: Submitted) -> None:
        for index, stream in enumerate(request.streams):
            expected = request.expected(index, EOS_PROBABILITY)
            assert stream.end is not None, "a sequence that never ended"
            assert stream.tokens == expected[: len(stream.tokens)]
            if stream.end.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE) or stream.end.stop_string:
                assert request.handle in self.cancelled or request.submit.HasField("timeout_ms")
            else:
                assert stream.tokens == expected

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        for _ in range(2000):
            self.stack.step()
            for session in list(self.stack.runners.runners):
                self.stack.runners.execute(session)
                self.stack.runners.deliver(session)
            if (
                self.stack.engine.idle
                and not self.stack.front.commands
                and not self.stack.runners.events
                and not any(self.stack.runners.results.values())
            ):
                break
        self.stack.step()
        for request in self.stack.requests.values():
            if request.refused is None:
                assert len(request.streams) == request.submit.n
                self._compare(request)
            elif request.refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
                # Its deadline could not be met: refused before it began.
                assert request.submit.timeout_ms and not request.streams and request.refused.retry_after_ms
            else:  # it was alone on runners that were killed, after it had been on others
                assert request.refused.code == grpc.StatusCode.INTERNAL.value[0]
                assert self.kills + max(0, self.cuts - PARDONS) >= STRIKES + LONE_LOSSES
        assert not self.stack.engine.quarantine.active
        self.stack.assert_clean()


EngineMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, phases=(Phase.generate,)
)
TestEngine = EngineMachine.TestCase
