"""Hypothesis drives the engine: admit, cancel, cut, preempt, expire, kill, in any order, with late results."""

from __future__ import annotations

import math
import random

import grpc
import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from roster_common.link_protocol import FORCED, OURS
from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.model.sequence import FinishReason, Sequence
from scheduler_svc.model.suspicion import LONE_LOSSES, PARDONS, STRIKES
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import VictimChoice, available_policies
from scheduler_svc.settings.tenant_limits import TenantLimits
from tests.support.constraints import CONSTRAINTS, allowed_after
from tests.support.drafters import LateHash, drafting_backend
from tests.support.failing_hash import FailingHash, LateFailingHash, failure_of
from tests.support.fake_moves import FakeMoves
from tests.support.in_process import Stack, Submitted
from tests.support.policies import policy_named
from tests.support.scripted_drafts import RandomDrafts
from tests.support.thoroughness import count

EOS_PROBABILITY = 1 / 24
BLOCK_SIZE = 4
NUM_BLOCKS = 14
STEM = [0, 1, 2, 3, 3, 2, 1, 0] * 4
"""Common start of many prompts, so that prefixes are hit, awaited and evicted."""
CONTEXTS = [random.Random(number).choices(range(4), k=32) for number in range(4)]
"""Starts of prompts that come back after others have taken their blocks."""
STOP_IDS = [IM_END_ID, 7, 8, 9, 10, 11]


DICE = st.builds(random.Random, st.integers(0, 2**32 - 1))
"""What draws much. `st.randoms` would take each draw from an example's limited data: runs that draft would be given up
half-way, and nearly all numbers be small."""


SIZES = {
    "num_slots": 3, "block_size": BLOCK_SIZE, "max_step_tokens": 10, "context_length": 128,
    "eos_probability": EOS_PROBABILITY,
}  # fmt: skip


def make_backend(
    num_blocks: int = NUM_BLOCKS, drafts: random.Random | None = None, *, fails: bool = False
) -> HashBackend:
    """Returns a hash backend that drafts if there are `drafts`, and may then overlap; with `fails`, one that can't
    continue some texts."""
    kinds = (FailingHash, LateFailingHash) if fails else (HashBackend, LateHash)
    if drafts is None:
        return kinds[0](num_blocks=num_blocks, **SIZES)
    kind = drafts.choice(kinds)
    return drafting_backend(kind, drafts, wrong=drafts.choice((0.1, 0.4)), num_blocks=num_blocks, **SIZES)


MODEL = make_backend().model
PROFILES = ("latency", "balanced", "throughput")


SAMPLING = plan_pb2.Sampling(temperature=0.0, top_p=1, repetition_penalty=1, stop_ids=pack(STOP_IDS))


class EngineMachine(RuleBasedStateMachine):
    """`check_scheduler` runs after every plan (settings.check); tokens and ends are compared at the end."""

    @initialize(
        depth=st.integers(1, 3),
        policy=st.sampled_from(available_policies()),
        sharing=st.sampled_from([True, True, False]),
        isolated=st.booleans(),
        runners=st.integers(1, 2),
        running=st.sampled_from([None, 1]),
        victim=st.sampled_from(list(VictimChoice)),
        timed=st.booleans(),
        drafts=st.one_of(st.none(), DICE),
        late=st.one_of(st.none(), DICE),
        forces=st.sampled_from([True, True, True, False]),
        host=st.one_of(st.none(), DICE),
        moves=st.one_of(st.none(), DICE),
        ranks=st.sampled_from([1, 1, 2]),
        scripted=st.sampled_from([True, True, True, False]),
        fails=st.sampled_from([False, False, True]),
        num_blocks=st.sampled_from([NUM_BLOCKS, 4 * NUM_BLOCKS]),
    )
    def start(
        self,
        depth: int,
        policy: str,
        sharing: bool,
        isolated: bool,
        runners: int,
        running: int | None,
        victim: VictimChoice,
        timed: bool,
        drafts: random.Random | None,
        late: random.Random | None,
        forces: bool,
        host: random.Random | None,
        moves: random.Random | None,
        ranks: int,
        scripted: bool,
        fails: bool,
        num_blocks: int,
    ) -> None:
        """`drafts`: draws what most runners draft; None: no runner has a drafter. `late`: draws which masks come late.

        `forces`: whether the first runners take forced tokens; later ones do. `host`: draws which runners have a host
        pool, of which size, and when its copies are done or lost; None: none has one. `moves`: draws the roles of
        runners and the fate of messages about moves; None: no runner takes part in moves. `ranks`: of each runner whose
        sequences can't move. `scripted`: whether `drafts` decides in place of the policy how much is drafted. `fails`:
        whether no runner can continue some texts. `num_blocks`: of runners; in the smallest pools few drafts have room.
        """
        self.fails, self.num_blocks = fails, num_blocks
        self.ranks = ranks if moves is None else 1
        self.host = host
        self.drafts = drafts
        self.stack = Stack(
            depth=None if timed else depth,
            profile=PROFILES[depth - 1],
            policy=policy,
            policy_parameters={"victim": victim},
            prefix_sharing=sharing,
            isolate_tenants=isolated,
            tenant_limits={"a": TenantLimits(running=running)},
        )
        if drafts is not None and scripted:
            self.stack.drafts = RandomDrafts(drafts)
        if fails:
            self.stack.runners.worthless = 0
        if timed:
            self.stack.time_plans(depth)
        self.stack.late = late
        self.stack.runners.secretive = host
        self.roles = moves
        if moves is not None:
            self.stack.runners.moves = FakeMoves(self.stack.runners.runners, moves)
        features, self.stack.runners.features = self.stack.runners.features, sorted(OURS if forces else OURS - {FORCED})
        self.cancelled: set[int] = set()
        self.cut_at_a_stop: dict[int, Sequence] = {}
        self.all_heard = True  # no client has left a request that goes on
        self.kills = self.cuts = self.crashes = self.spells = 0
        self.backends: list[HashBackend] = []
        for _ in range(runners):
            self._add_runner()
        self.stack.runners.features = features
        self.stack.step()

    def _add_runner(self) -> None:
        """Every third one is larger: all of them can hold each request, but they are of two size classes."""
        larger = self.stack._sessions % 3 == 2
        drafts = self.drafts if self.drafts is not None and self.drafts.random() < 0.8 else None
        if drafts is not None and self.ranks > 1:
            drafts = random.Random(drafts.random())  # each rank draws the same
        self.backends.append(make_backend(self.num_blocks + 5 * larger, drafts, fails=self.fails))
        if self.roles is not None and (role := self.roles.choice(["", "", "prefill", "decode"])):
            self.stack.runners.roles[f"runner-{self.stack._sessions + 1}"] = role
        if self.host is None:
            self.stack.add_runner(self.backends[-1], ranks=self.ranks)
            return
        host_blocks, lost = self.host.choice((0, 4, NUM_BLOCKS, 4 * NUM_BLOCKS)), self.host.choice((0.0, 0.0, 0.3))
        copies = random.Random(self.host.random())
        self.stack.add_runner(self.backends[-1], host_blocks, copies, lost, self.ranks)

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
        num_received=st.sampled_from([0, 0, 0, 1, 4]),
        priority=st.sampled_from([0, 0, 5, -5]),
        logprobs=st.sampled_from([None, None, None, 1]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
        constraint=st.sampled_from([None] * 8 + CONSTRAINTS),
        min_tokens=st.sampled_from([0, 0, 3, 8]),
        speculates=st.sampled_from([True, True, True, False]),
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
        num_received: int,
        priority: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        constraint: tuple[str, str] | None,
        min_tokens: int,
        speculates: bool,
    ) -> None:
        sampling = plan_pb2.Sampling(temperature=temperature, top_p=1, repetition_penalty=1, stop_ids=pack(STOP_IDS))
        if constraint is None:
            sampling.min_tokens = min_tokens
        if logprobs is not None:
            sampling.logprobs = logprobs
        if prompt_logprobs is not None:
            sampling.prompt_logprobs = prompt_logprobs
        fields: dict[str, object] = {
            "cache_salt": cache_salt,
            "tenant": tenant,
            "keep_ms": keep_ms,
            "priority": priority,
            "no_speculation": not speculates,
        }
        if timeout_ms is not None:
            fields["timeout_ms"] = timeout_ms
        if constraint is not None:
            fields["grammar_kind"], fields["grammar"] = constraint
        elif num_received and n == 1:
            submit = engine_pb2.Submit(prompt=pack(prompt), max_tokens=max_tokens, sampling=sampling)
            tokens = Submitted(0, submit, seed=seed).expected(0, EOS_PROBABILITY)
            fields["received"] = pack(tokens[: min(num_received, len(tokens) - 1)])
        request = self.stack.submit(prompt, max_tokens, n=n, seed=seed, sampling=sampling, **fields)
        if constraint is not None:
            request.allowed = allowed_after(MODEL, *constraint, stop_ids=STOP_IDS)

    @rule()
    def step(self) -> None:
        self.stack.step()

    @rule(rng=DICE)
    def execute(self, rng: random.Random) -> None:
        if self.stack.runners.runners:
            self.stack.runners.execute(rng.choice(sorted(self.stack.runners.runners)))

    @rule(rng=DICE)
    def deliver(self, rng: random.Random) -> None:
        if self.stack.runners.runners:
            self.stack.runners.deliver(rng.choice(sorted(self.stack.runners.runners)))

    @rule(rng=DICE)
    def turns(self, rng: random.Random) -> None:
        for _ in range(12):
            self.stack.turn(rng)

    @rule(rng=DICE, stems=st.integers(2, 4), rounds=st.integers(2, 3))
    def contexts_come_back(self, rng: random.Random, stems: int, rounds: int) -> None:
        """Prompts with other beginnings take turns, so that the cache loses each before it is back."""
        for number in range(stems * rounds):
            prompt = [*CONTEXTS[number % stems][: rng.randint(20, 31)], rng.randrange(4)]
            self.stack.submit(prompt, rng.randint(1, 4), sampling=SAMPLING, seed=rng.randrange(10))
            for _ in range(rng.randint(6, 14)):
                self.stack.turn(rng)

    @rule(rng=DICE, requests=st.integers(1, 3))
    def answers_go_on(self, rng: random.Random, requests: int) -> None:
        """Some texts without an end token decode for a while, so that rows draft and runs are in flight next."""
        for _ in range(requests):
            sampling = plan_pb2.Sampling(temperature=rng.choice((0.0, 1.0)), top_p=1, repetition_penalty=1)
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, 9))]
            self.stack.submit(prompt, rng.randint(20, 45), sampling=sampling, seed=rng.randrange(10))
        for _ in range(rng.randint(20, 80)):
            self.stack.turn(rng)

    @precondition(lambda self: self.stack.requests)
    @rule(rng=DICE, how=st.sampled_from(["cancel", "disconnect"]))
    def cancel(self, rng: random.Random, how: str) -> None:
        handle = rng.choice(sorted(self.stack.requests))
        self.cancelled.add(handle)
        self.all_heard &= how == "cancel"
        message = engine_pb2.Cancel(handle=handle) if how == "cancel" else engine_pb2.Disconnect(handle=handle)
        self.stack.front.put(**{how: message})

    @rule(turns=st.integers(0, 4))
    def slow_masks(self, turns: int) -> None:
        """Delays masks by this many turns of their runner: their rows' sequences may leave in the meantime."""
        self.stack.runners.mask_delay = turns

    @rule(rng=DICE, turns=st.integers(1, 6))
    def overtaken(self, rng: random.Random, turns: int) -> None:
        """Cancels a request whose rows wait for masks; one with a prompt of many chunks may follow."""
        self.stack.runners.mask_delay = turns
        constraint = rng.choice(CONSTRAINTS)
        sampling = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, stop_ids=pack(STOP_IDS))
        prompt = [rng.randrange(4) for _ in range(rng.randint(10, 13))]
        tied = self.stack.submit(prompt, 20, seed=1, sampling=sampling, grammar=grammar_text(*constraint))
        tied.allowed = allowed_after(MODEL, *constraint, stop_ids=STOP_IDS)
        for _ in range(6):
            self.stack.step()
            if awaiting := self.stack.awaiting():
                break
            self._all_runners()
        else:
            return
        gone = rng.choice(awaiting)
        self.cancelled.add(gone.handle)
        self.stack.front.put(cancel=engine_pb2.Cancel(handle=gone.handle))
        for _ in self.stack.runners.runners:
            self.stack.submit([rng.randrange(4) for _ in range(20)], 4, seed=2, sampling=sampling)
        for _ in range(3):
            self.stack.step()
            self._all_runners()

    def _all_runners(self) -> None:
        """Each runner takes one plan and answers one."""
        for session in sorted(self.stack.runners.runners):
            self.stack.runners.execute(session)
            self.stack.runners.deliver(session)

    @precondition(lambda self: self.stack.streams)
    @rule(rng=DICE)
    def cut(self, rng: random.Random) -> None:
        sequence_id = rng.choice(sorted(self.stack.streams))
        keep = rng.randint(0, len(self.stack.streams[sequence_id].tokens))
        self.cancelled.update(
            request.handle
            for request in self.stack.requests.values()
            if request.first_sequence_id is not None
            and request.first_sequence_id <= sequence_id < request.first_sequence_id + request.submit.n
        )
        self.stack.front.put(cut=engine_pb2.Cut(sequence_id=sequence_id, num_tokens=keep, stop_string="x"))
        sequence = self.stack.engine.requests.book.sequence(sequence_id)
        if sequence is not None:
            self.cut_at_a_stop[sequence_id] = sequence

    @rule()
    def flush(self) -> None:
        """Empties the prefix caches."""
        self.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=0))

    @rule(policy=st.sampled_from(available_policies()))
    def swap_policy(self, policy: str) -> None:
        self.stack.engine.swap.most_ranked = 2  # so that the next rules run while the queue is being reordered
        self.stack.engine.change_policy(policy_named(policy))

    @rule(seconds=st.floats(0.1, 2))
    def time_passes(self, seconds: float) -> None:
        self.stack.now_s += seconds

    @precondition(lambda self: self.stack.runners.runners)
    @rule(rng=DICE)
    def kill(self, rng: random.Random) -> None:
        self.stack.runners.kill(rng.choice(sorted(self.stack.runners.runners)))
        self.kills += 1
        self._add_runner()

    def _compare(self, request: Submitted) -> None:
        before = np.frombuffer(request.submit.prompt + request.submit.received, "<i4").tolist()
        for index, stream in enumerate(request.streams):
            expected = request.expected(index, EOS_PROBABILITY)[len(request.submit.received) // 4 :]
            failed = failure_of(before, expected) if self.fails else None
            expected = expected[:failed]
            assert stream.end is not None, "a sequence that never ended"
            assert stream.tokens == expected[: len(stream.tokens)]
            may_draft = not (request.submit.no_speculation or request.allowed)
            assert stream.end.accepted_tokens <= stream.end.drafted_tokens * may_draft
            assert stream.end.accepted_tokens <= stream.end.num_tokens
            if stream.end.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE) or stream.end.stop_string:
                assert request.handle in self.cancelled or request.submit.HasField("timeout_ms")
            else:
                assert stream.tokens == expected
                assert (stream.end.reason == FinishReason.ERROR) == (failed is not None)

    def _check_accounts(self) -> None:
        """Tenants are charged for the tokens that their streams got, up to a stop string, whatever was drafted."""
        got = {"": 0, "a": 0}
        for request in self.stack.requests.values():
            for index, stream in enumerate(request.streams):
                cut = self.cut_at_a_stop.get((request.first_sequence_id or 0) + index)
                left = math.inf if cut is None else max(0, cut.num_generated - cut.request.num_received)
                got[request.submit.tenant] += int(min(len(stream.tokens), left))
        assert {tenant: self.stack.engine.ledger.account(tenant).sampled_tokens for tenant in got} == got

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        for _ in range(2000):
            self.stack.step()
            if self.stack.engine.probation.active or len(self.stack.engine.moves.transfers):
                self.stack.now_s += 0.1
            for session in list(self.stack.runners.runners):
                self.stack.runners.execute(session)
                self.stack.runners.deliver(session)
            if (
                self.stack.engine.requests.idle
                and not self.stack.front.commands
                and not self.stack.runners.events
                and not any(self.stack.runners.results.values())
                and not self.stack.is_copying
                and not len(self.stack.engine.moves.transfers)
            ):
                break
        self.stack.step()
        for request in self.stack.requests.values():
            if request.refused is None:
                assert len(request.streams) == request.submit.n
                self._compare(request)
            elif request.refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
                # Its deadline could not be met: it was refused before it began, or when it was sent again to a new
                # scheduler.
                assert request.submit.timeout_ms and request.refused.retry_after_ms
                assert self.stack.restarts or not request.streams
            else:  # it ran alone on runners that were killed, after it had run on others
                assert request.refused.code == grpc.StatusCode.INTERNAL.value[0]
                losses = self.kills + self.crashes + self.spells + max(0, self.cuts - PARDONS)
                losses += self.stack.runners.worthless or 0
                assert losses >= STRIKES + LONE_LOSSES
        if self.all_heard and not self.stack.restarts:
            self._check_accounts()
        assert not self.stack.engine.quarantine.active
        assert not any(backend.host_slots.strays for backend in self.backends)
        self.stack.assert_clean()


EngineMachine.TestCase.settings = settings(
    max_examples=count(80, in_ci=11), stateful_step_count=50, deadline=None, phases=(Phase.generate,)
)
TestEngine = EngineMachine.TestCase
