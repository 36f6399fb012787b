"""Engine and runner in one thread, with links that a test can delay: any interleaving without sockets or real time."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import numpy as np

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend
from runner_svc.tiers.thread_copier import HostCache
from scheduler_svc.engine.engine import Engine
from scheduler_svc.failure.runner_lifecycle import RECOVERY_S
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.fake_links import FakeFront, FakeRunners
from tests.support.mask_handles import Fate, lives, work_inline
from tests.support.policies import policy_named
from tests.support.rank_group import RankGroup
from tests.support.scored_streams import ScoredStream
from tests.support.scripted_drafts import Script, follow_script
from tests.support.stepped_copier import SteppedCopier


@dataclass
class Stream:
    """What a client has received of one sequence; `at` < len(tokens) while a new engine recomputes it."""

    tokens: list[int] = field(default_factory=list)
    end: engine_pb2.End | None = None
    at: int = 0
    again: bool = False
    """True while a new engine recomputes a sequence that had already ended."""
    open_ended: bool = False
    """Whether the runner's size decides where the sequence ends: a runner that recomputes it may be smaller."""

    def take(self, token: int) -> None:
        """Takes the next token from the engine: a new one, or the one that the client already has at this position."""
        if self.at == len(self.tokens):
            assert self.end is None, "a token after the end"
            self.tokens.append(token)
        assert self.tokens[self.at] == token, f"token {self.at} was {self.tokens[self.at]} and is {token} now"
        self.at += 1

    def finish(self, end: engine_pb2.End) -> None:
        """Takes the sequence's end, which a new engine may send again."""
        whole = end.reason == FinishReason.STOP or (end.reason == FinishReason.LENGTH and not self.open_ended)
        assert self.at == len(self.tokens) or not whole, "the end came before tokens that the client has"
        assert self.end is None or self.again, "ended twice"
        assert self.end is None or self.end.reason == end.reason or not whole
        self.end, self.again = self.end or end, False

    def go_on(self) -> None:
        """Expects a new engine to continue after the tokens that the client has; they were sent with the request."""
        self.at = len(self.tokens)

    def begin_again(self) -> None:
        """Expects a new engine to send the sequence again from its first token."""
        self.at, self.again = 0, self.end is not None


def new_streams(submit: engine_pb2.Submit) -> list[Stream]:
    return [Stream(open_ended=submit.open_ended) for _ in range(submit.n)]


@dataclass
class Submitted:
    """A request of the test, with its expected answer."""

    handle: int
    submit: engine_pb2.Submit
    first_sequence_id: int | None = None
    seed: int = 0
    allowed: Callable[[list[int]], list[int]] | None = None
    """For a constrained request: the tokens allowed after the given generated tokens."""
    refused: engine_pb2.Refused | None = None
    streams: list[Stream] = field(default_factory=list)
    """One stream per choice, set when the request is accepted."""

    def expected(self, index: int, eos_probability: float) -> list[int]:
        """Returns a choice's expected tokens, computed by the slow twin from the prompt and the received tokens."""
        received = np.frombuffer(self.submit.received, "<i4").tolist()
        stop_ids = np.frombuffer(self.submit.sampling.stop_ids, "<i4").tolist()
        if received and received[-1] in stop_ids:
            return received
        return received + expected_tokens(
            np.frombuffer(self.submit.prompt, "<i4").tolist() + received,
            self.submit.max_tokens - len(received),
            temperature=self.submit.sampling.temperature,
            seed=self.seed,
            sample_index=index,
            min_tokens=max(0, self.submit.sampling.min_tokens - len(received)),
            stop_ids=stop_ids,
            eos_probability=eos_probability,
            allowed=None if (allowed := self.allowed) is None else lambda generated: allowed(received + generated),
        )


class Stack:
    """Engine, fake links, hash runners, and a record of what each stream received."""

    def __init__(
        self, clock: Callable[[], float] | None = None, guard: PolicyGuard | None = None, **settings: object
    ) -> None:
        """`guard`: a policy that is not registered by name."""
        self.now_s = 0.0
        self._guard = guard
        self.settings = SchedulerSettings(**{"check": True, "retention_s": 0, "retention_requests": 0, **settings})  # type: ignore[arg-type]
        self._clock = clock or (lambda: self.now_s)
        self._attaching: set[int] = set()
        self.restarts = 0
        self._tick_s = 0.0
        self.fate: Fate = lives
        """Decides when mask processes die."""
        self.late: random.Random | None = None
        """Draws whether answers about masks come late, and whether plans wait for them."""
        self.drafts: Script | None = None
        """Decides how many tokens rows draft on runners that have a drafter, in place of the policy."""
        self.front, self.runners = FakeFront(), FakeRunners()
        self.engine = self._new_engine()
        self.front.put(hello=engine_pb2.WorkerHello(worker=0))
        self.requests: dict[int, Submitted] = {}
        self.streams: dict[int, Stream] = {}
        self.scored: dict[int, ScoredStream] = {}
        self.scores_of_hashes = True
        """Whether log-probabilities are checked, which are then those of a hash backend."""
        self.model: engine_pb2.ModelState | None = None
        self.others: list[engine_pb2.FromEngine] = []
        self._sessions = 0

    def _new_engine(self) -> Engine:
        name, parameters = self.settings.policy, self.settings.policy_parameters
        guard = self._guard or PolicyGuard(load_policy(name, parameters) if parameters else policy_named(name))
        engine = Engine(self.settings, guard, self.front, self.runners, self._clock, self.wall_clock)  # type: ignore[arg-type]
        work_inline(engine.constraints, lambda *asked: self.fate(*asked), self._is_late)
        pays = engine.constraints.masks.looking_ahead.pays
        engine.constraints.masks.looking_ahead.pays = lambda sequences, running: (  # type: ignore[method-assign]
            pays(sequences, running) if self.late is None else self.late.random() < 0.5
        )
        return engine

    def _is_late(self) -> bool:
        return self.late is not None and self.late.random() < 0.3

    def time_plans(self, seed: int) -> None:
        """Lets time pass with each step, and runners say by how much plans were early, so that plans are held back."""
        self._tick_s, self.runners.early = 0.001, random.Random(seed)

    def wall_clock(self) -> float:
        """Returns seconds since 1970, derived from the test's clock so that a run can be repeated."""
        return 1.7e9 + self._clock()

    def restart_scheduler(self) -> None:
        """Kills the engine and starts a new one: runners keep their sequences, and clients attach once it serves."""
        self.restarts += 1
        self.front.commands, self.front.messages = [], []
        self.runners.events = []
        self.engine = self._new_engine()
        self.front.put(hello=engine_pb2.WorkerHello(worker=0))
        for session in list(self.runners.runners):
            self._sessions += 1
            runner = self.runners.runners[session]
            self.runners.dismiss(session)
            self.runners.connect(self._sessions, runner, former=session, holds=True)
        self.step()
        self.step()
        self.now_s += RECOVERY_S  # the recovery window is over: unknown requests are now reported as unknown
        self.streams, self.scored = {}, {}
        for request in self.requests.values():
            if request.refused is None and not (request.streams and all(s.end for s in request.streams)):
                self.attach(request)

    def succeed(self) -> Stack:
        """Starts a new scheduler while this one is paused. Returns the paused one with its clients, to resume later."""
        old = copy.copy(self)
        old.requests, old.streams, old.scored = copy.deepcopy((self.requests, self.streams, self.scored))
        old._attaching = set(self._attaching)
        for session in old.runners.runners:
            old.runners.finish(session)
        self.front, self.runners = FakeFront(), FakeRunners()
        self.runners.roles = old.runners.roles
        if old.runners.moves is not None:
            self.runners.moves = old.runners.moves.handed_over(self.runners.runners)
        self.runners.early, self.runners.worthless = old.runners.early, old.runners.worthless
        self.runners.runners.update(old.runners.runners)
        old.runners.runners.clear()
        self.runners.ill, self.runners.secretive = old.runners.ill, old.runners.secretive
        self.restart_scheduler()
        return old

    def attach(self, request: Submitted) -> None:
        """Attaches to a request by its id; if it is unknown, the client sends it again with the received tokens."""
        self._attaching.add(request.handle)
        self.front.put(
            attach=engine_pb2.Attach(
                handle=request.handle, tenant=request.submit.tenant, request_id=request.submit.request_id
            )
        )

    def is_attaching(self, request: Submitted) -> bool:
        """Whether the client has sent an attach for its request and awaits the answer."""
        return request.handle in self._attaching

    def _send_again(self, request: Submitted) -> None:
        submit = engine_pb2.Submit()
        submit.CopyFrom(request.submit)
        if request.first_sequence_id is not None:
            submit.seed = request.seed
        if request.streams and submit.n == 1 and request.streams[0].tokens:
            submit.received += pack(request.streams[0].tokens)
            submit.digest = hashlib.blake2b(submit.digest + submit.received).digest()
        self._attaching.add(request.handle)  # a runner's snapshot may have restored it meanwhile
        self.front.put(submit=submit)

    def add_runner(
        self,
        backend: Backend,
        host_blocks: int = 0,
        copies: random.Random | None = None,
        lost: float = 0.0,
        ranks: int = 1,
    ) -> int:
        """`host_blocks`: those of its host pool, for a backend on the CPU.

        `copies` draws when they are copied; `lost` is the probability that the end of a ticket is never reported.
        `ranks` > 1: as many copies of the unused hash backend compute as one runner.
        """
        copier = None
        if ranks > 1:
            assert isinstance(backend, HashBackend)
            seed = copies.random() if copies is not None else 1.0

            def make_copier(one: HashBackend, rank: int) -> SteppedCopier:
                return SteppedCopier(one.cache_regions, host_blocks, random.Random(seed + rank), lost)

            return self.connect(RankGroup.spread(backend, ranks, make_copier if host_blocks else None).runner)
        if host_blocks and isinstance(backend, HostCache):
            copier = SteppedCopier(backend.cache_regions, host_blocks, copies or random.Random(1), lost)
        return self.connect(Runner(backend, copier=copier))

    def connect(self, runner: Runner) -> int:
        """Connects a new runner; returns its session."""
        self._sessions += 1
        runner.runner_id = f"runner-{self._sessions}"
        self.runners.connect(self._sessions, runner)
        return self._sessions

    @property
    def is_copying(self) -> bool:
        """Whether any scheduler awaits copies, or keeps blocks for a waiting sequence."""
        return any(scheduler.is_copying for scheduler in self.engine.pool.schedulers.values())

    def submit(self, prompt: list[int], max_tokens: int, **fields: object) -> Submitted:
        handle = len(self.requests) + 1
        fields.setdefault("sampling", plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1))
        fields.setdefault("request_id", f"r{handle}")
        fields.setdefault("n", 1)
        submit = engine_pb2.Submit(prompt=pack(prompt), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
        submit.digest = submit.digest or hashlib.blake2b(submit.SerializeToString()).digest()
        submit.handle = handle
        self.requests[handle] = Submitted(handle, submit)
        self.front.put(submit=submit)
        return self.requests[handle]

    def step(self) -> None:
        """Runs one engine step and takes in the messages that it published."""
        self.now_s += self._tick_s
        if self.drafts is not None:
            for scheduler in self.engine.pool.schedulers.values():
                follow_script(scheduler, self.drafts)
        self.engine.step()
        messages, self.front.messages = self.front.messages, []
        for _, message in messages:
            self._take(message)

    def _take(self, message: engine_pb2.FromEngine) -> None:
        kind = message.WhichOneof("message")
        if kind == "accepted":
            request = self.requests[message.accepted.handle]
            self._attaching.discard(request.handle)
            assert not request.streams or request.first_sequence_id not in self.streams, "accepted twice"
            request.first_sequence_id, request.seed = message.accepted.first_sequence_id, message.accepted.seed
            request.streams = request.streams or new_streams(request.submit)
            for index, stream in enumerate(request.streams):
                if request.submit.n > 1:
                    stream.begin_again()
                else:
                    stream.go_on()
                self.streams[request.first_sequence_id + index] = stream
            begun = len(request.submit.prompt + request.submit.received) // 4
            lengths = [begun + stream.at for stream in request.streams]
            self._follow(ScoredStream(request.submit, request.first_sequence_id, lengths), request)
        elif kind == "refused":
            if message.refused.handle in self.requests:
                self._refused(self.requests[message.refused.handle], message.refused)
            else:
                self.others.append(message)
        elif kind == "attached" and message.attached.handle in self._attaching:
            self._attaching.discard(message.attached.handle)
            self._attached(self.requests[message.attached.handle], message.attached)
        elif kind == "model":
            self.model = message.model
        elif kind == "step":
            self._take_step(message.step)
        else:
            self.others.append(message)

    def _refused(self, request: Submitted, refused: engine_pb2.Refused) -> None:
        if refused.code == grpc.StatusCode.NOT_FOUND.value[0]:
            self._send_again(request)
        elif refused.code == grpc.StatusCode.UNAVAILABLE.value[0] and self.restarts:
            self._heard_all(request)
            self.now_s += refused.retry_after_ms / 1000
            self.attach(request)
        elif refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0] and request.handle in self._attaching:
            self.attach(request)
        else:
            request.refused = refused

    def _heard_all(self, request: Submitted) -> None:
        """Stops following the request's streams: a later request with the same id has been found and may have ended."""
        ended = {id(stream) for stream in request.streams}
        self.streams = {key: stream for key, stream in self.streams.items() if id(stream) not in ended}

    def _attached(self, request: Submitted, attached: engine_pb2.Attached) -> None:
        if not request.streams:
            request.streams = new_streams(request.submit)
        request.first_sequence_id = attached.choices[0].sequence_id
        if self.scores_of_hashes:
            self._follow(ScoredStream.attached(request.submit, attached), request)
        for stream, record in zip(request.streams, attached.choices, strict=True):
            self.streams[record.sequence_id] = stream
            stream.begin_again()
            num_received = len(request.submit.received) // 4
            for token in np.frombuffer(record.tokens, "<i4").tolist()[num_received:]:
                stream.take(token)
            if record.HasField("end"):
                stream.finish(record.end)

    def _follow(self, scored: ScoredStream, request: Submitted) -> None:
        for index in range(request.submit.n):
            self.scored[(request.first_sequence_id or 0) + index] = scored

    def _take_step(self, step: engine_pb2.Step) -> None:
        ids = np.frombuffer(step.sequence_ids, "<u8").tolist()
        tokens = np.frombuffer(step.tokens, "<i4").tolist()
        scores = {row.row: row for row in step.logprobs}
        prompt_ids = np.frombuffer(step.prompt_sequence_ids, "<u8").tolist()
        for sequence_id, row in zip(prompt_ids, step.prompt_logprobs, strict=True):
            self.scored[sequence_id].take_prompt(row)
        for index, (sequence_id, token) in enumerate(zip(ids, tokens, strict=True)):
            self.scored[sequence_id].take(sequence_id, token, scores.get(index))
            self.streams[sequence_id].take(token)
        for end in step.ends:
            self.streams[end.sequence_id].finish(end)

    def awaiting(self) -> list[Submitted]:
        """Returns the requests with a row in flight whose token waits for its mask."""
        by_id = {key: request for request in self.requests.values() for key in self._ids(request)}
        tables = [scheduler.table for scheduler in self.engine.pool.schedulers.values()]
        waiting = (table.sequence_id[table.constrained & (table.known != table.length)] for table in tables)
        return [by_id[key] for ids in waiting for key in ids.tolist() if key in by_id]

    @staticmethod
    def _ids(request: Submitted) -> range:
        first = request.first_sequence_id
        return range(0) if first is None else range(first, first + request.submit.n)

    def run(self, rng: random.Random, max_turns: int = 100_000) -> None:
        """Makes progress in random order (steps, executions, deliveries) until all requests have ended."""
        for _ in range(max_turns):
            self.turn(rng)
            idle = self.engine.requests.idle and not self.front.commands and not self.is_copying
            if idle and not any(self.runners.plans.values()):
                self.step()
                return
        raise AssertionError(
            f"not done after {max_turns} turns: {self.engine.requests.queue.num_tokens} tokens are queued"
        )

    def turn(self, rng: random.Random) -> None:
        """Performs one random action: an engine step, an execution or a delivery."""
        session = rng.choice(list(self.runners.runners)) if self.runners.runners else 0
        choice = rng.randrange(3)
        if choice == 0:
            self.step()
        elif choice == 1:
            self.runners.execute(session)
        else:
            self.runners.deliver(session)

    def whole_turn(self, *sessions: int, turn_s: float = 0.0, most_plans: int = 8) -> None:
        """Steps the engine, executes each runner's plans, advances time by `turn_s` seconds and delivers the results.

        `most_plans` limits the plans that each runner executes: with 1, a runner that was sent two keeps one in flight.
        No runner has more than 8.
        """
        self.step()
        for session in sessions:
            for _ in range(most_plans):
                self.runners.execute(session)
        self.now_s += turn_s
        for session in sessions:
            for _ in range(most_plans):
                self.runners.deliver(session)

    def advance(self, session: int, turns: int = 1, turn_s: float = 0.0) -> None:
        """Runs whole turns with one runner, then a step that takes in the last turn's results."""
        for _ in range(turns):
            self.whole_turn(session, turn_s=turn_s)
        self.step()

    def assert_clean(self) -> None:
        """Checks that pool and queue are as they were before the first request."""
        assert not self.engine.requests.queue and not self.engine.requests.book.num_live
        assert not len(self.engine.moves.sequences) and not len(self.engine.moves.transfers)
        for scheduler in self.engine.pool.schedulers.values():
            assert not scheduler.moves.held and not scheduler.moves.arrivals and not scheduler.moves.expected
            assert scheduler.table.num_running == 0
            assert scheduler.pool.num_free == scheduler.pool.num_blocks
            check_scheduler(scheduler)
            if scheduler.tiers is not None:
                assert scheduler.tiers.host.num_room == scheduler.tiers.host.num_blocks
