"""Holds each early refusal against the truth: what the same request took when it was admitted after all.

A `World` plays clients of a `Mix` against the engine and hash runners, on a clock of its own. Whenever the engine would
refuse a request for its deadline, the world splits (`fork`): in one branch the request is refused, and the world goes
on; in the other it is admitted, and all that follows happens as it does then, until the request has ended. After the
refusal the same request is judged anew as time goes on, without being sent: so the first time is known at which it
would have been accepted.

    python -m tests.support.refusal_trials MIX SEED SECONDS

prints what came of one world as JSON. It forks, so it is a process of its own, without threads.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from roster_common.logs import configure_logs
from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch, StepOutput
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.model.sequence import FinishReason, Request
from scheduler_svc.plan.plan_draft import pack
from tests.support.in_process import Stack, Submitted

ENDS = ("length", "eos", "stop", "cancel", "disconnect", "error")
OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
TRIED = 0.5
"""Of the refusals, the part that is tried."""
PROBE_S = 0.1
"""How often a request that was refused is judged anew."""
_FAILS = 1 << 40
"""Added to a seed: the row fails with the token whose number is the rest."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What clients want, and what serves them."""

    ends: dict[str, float]
    """How much of each kind of end, of `ENDS`; deadlines end requests of every kind."""
    runners: int = 1
    slots: int = 8
    blocks: int = 400
    """KV blocks of 8 tokens a runner; a few are the reason for preemptions."""
    load: float = 0.5
    """Of what the runners can do: requests that come one by one."""
    batch: int = 120
    """Requests of a batch, at most; 0: there are none. The next one comes when the last is done, and a while later."""
    choices: int = 1
    policy: str = "fcfs"
    tenants: int = 1
    takeover_s: float = 0.0
    """Seconds between takeovers by a new scheduler; 0: none."""
    slack: tuple[float, float] = (2.0, 12.0)
    """A client's deadline is so many times what its request takes alone at most; evenly on a logarithmic scale."""


MIXES = {
    "length": Mix({"length": 1}),
    "eos": Mix({"eos": 1}),
    "stop": Mix({"stop": 1}),
    "cancel": Mix({"length": 0.4, "stop": 0.3, "cancel": 0.2, "disconnect": 0.1}),
    "all": Mix({"length": 0.3, "eos": 0.3, "stop": 0.2, "cancel": 0.1, "disconnect": 0.05, "error": 0.05}),
    "fleet": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, runners=3, batch=300),
    "choices": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, choices=3),
    "preemption": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, slots=16, blocks=90, load=0.3),
    "priority": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, policy="priority"),
    "fair": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, policy="fair", tenants=3),
    "takeover": Mix({"length": 0.5, "eos": 0.3, "stop": 0.2}, takeover_s=12.0),
    "overload": Mix({"length": 0.3, "eos": 0.3, "stop": 0.3, "cancel": 0.1}, load=1.6, batch=0),
}

FORESEEABLE = [name for name in MIXES if name != "overload"]
"""Those whose load is not for ever more than can be served: when that ends nobody can know."""

STEP_S, POSITION_S = 0.05, 0.0004
"""A step takes so long, and so much longer for each position that it computes."""
MOST_TOKENS = 100
EOS = 1 / 30
MEAN_S = 40 * STEP_S
"""In a slot, about."""


@dataclass(slots=True)
class Wish:
    """What one client is about to do."""

    at_s: float
    end: str
    prompt_len: int
    max_tokens: int
    timeout_ms: int | None
    cut_at: int | None = None
    """Tokens with which a stop string is complete."""
    leaves_s: float | None = None
    """Seconds after which the client has had enough."""
    fails_at: int | None = None
    n: int = 1
    priority: int = 0
    tenant: str = ""


@dataclass(slots=True)
class Verdict:
    """A request with a deadline: what the engine said of it, and what came of it."""

    request_id: str
    at_s: float
    timeout_s: float
    refused: bool
    weight: float = 1.0
    """Requests that it stands for."""
    retry_s: float = 0.0
    reason: int = 0
    """How it ended, or would have; 0: it was sent again to a new scheduler, and refused there."""
    took_s: float = 0.0
    accepted_after_s: float | None = None
    """Seconds from the refusal to the first time at which it would have been accepted; None: never judged so."""

    @property
    def met(self) -> bool:
        """It came to its own end in time, or would have."""
        return self.reason in OWN_ENDS and self.took_s <= self.timeout_s

    @property
    def missed(self) -> bool:
        """Time was up before: also for one that was sent again to a new scheduler, which counts its time anew."""
        return self.reason == FinishReason.DEADLINE or (self.reason in OWN_ENDS and self.took_s > self.timeout_s)


@dataclass(slots=True)
class Report:
    """What came of one world, or of several."""

    verdicts: list[Verdict] = field(default_factory=list)
    requests: int = 0

    def add(self, other: Report) -> None:
        self.verdicts += other.verdicts
        self.requests += other.requests

    def _count(self, refused: bool, met: bool) -> float:
        return sum(v.weight for v in self.verdicts if v.refused == refused and (v.met if met else v.missed))

    @property
    def refused(self) -> float:
        return sum(v.weight for v in self.verdicts if v.refused)

    @property
    def wrongly(self) -> float:
        """Refused, and would have met their deadlines."""
        return self._count(True, True)

    @property
    def met(self) -> float:
        """Requests that met their deadlines or would have."""
        return self.wrongly + self._count(False, True)

    @property
    def rightly(self) -> float:
        """Refused, and would have missed their deadlines."""
        return self._count(True, False)

    @property
    def missed(self) -> float:
        """Requests that missed their deadlines or would have."""
        return self.rightly + self._count(False, False)

    @property
    def timed(self) -> list[Verdict]:
        """Refusals of which it is known when the same request would have been accepted."""
        return [v for v in self.verdicts if v.refused and v.accepted_after_s is not None]

    @property
    def true_times(self) -> int:
        """Of these, those whose RetryInfo was true: within a factor of 2 or half a second, whichever is wider."""
        return sum(is_true(v.retry_s, v.accepted_after_s or 0.0) for v in self.timed)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.refused:.0f} refused: "
            f"wrongly {self.wrongly:.0f} of {self.met:.0f} that meet theirs ({share(self.wrongly, self.met):.2%}; "
            f"{share(self.wrongly, self.refused):.1%} of refusals), "
            f"rightly {self.rightly:.0f} of {self.missed:.0f} that miss it ({share(self.rightly, self.missed):.1%}), "
            f"RetryInfo true {self.true_times} of {len(self.timed)} ({share(self.true_times, len(self.timed)):.1%})"
        )


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def is_true(said_s: float, was_s: float) -> bool:
    """Within 2 times, or half a second."""
    return abs(said_s - was_s) <= 0.5 or was_s / 2 <= said_s <= was_s * 2


class FailingBackend(HashBackend):
    """Rows whose seed says so fail with the token of that number."""

    def _draw(self, batch: StepBatch, rows: Any, picked: list[int], *held: Any) -> StepOutput:
        super()._draw(batch, rows, picked, *held)
        finite = np.ones(len(picked), np.bool_)
        for index, row in enumerate(rows.tolist()):
            seed = int(batch.params[row]["seed"])
            generated = int(batch.ends[row]) - batch.states[row].prompt_len
            finite[index] = not (_FAILS <= seed < 2 * _FAILS and generated >= seed - _FAILS)
        return StepOutput.sampled(len(batch.slots), rows, np.array(picked, np.int32), finite)


def single_wishes(mix: Mix, seed: int, seconds: float) -> list[Wish]:
    """Those of clients that come one by one in so many seconds, in order; most of them with a deadline."""
    rng = random.Random(f"{seed} single")
    rate = mix.load * mix.slots * mix.runners / MEAN_S / ((1 + mix.choices) / 2)
    wishes, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        wishes.append(_wish(mix, at_s, rng, rng.random() < 0.8))
        at_s += rng.expovariate(rate)
    return wishes


def batch_wishes(mix: Mix, seed: int, number: int, at_s: float) -> list[Wish]:
    """A batch: many at once, without deadlines."""
    rng = random.Random(f"{seed} batch {number}")
    return [_wish(mix, at_s, rng, False) for _ in range(rng.randrange(mix.batch // 3, mix.batch + 1))]


def _wish(mix: Mix, at_s: float, rng: random.Random, in_time: bool) -> Wish:
    (end,) = rng.choices(list(mix.ends), list(mix.ends.values()))
    exact = end == "length"
    wish = Wish(
        at_s,
        end,
        prompt_len=min(100, 1 + int(rng.expovariate(1 / 20))),
        max_tokens=rng.randrange(5, 75) if exact else MOST_TOKENS,
        timeout_ms=None,
        n=rng.randrange(1, mix.choices + 1),
        priority=rng.choice((0, 0, 1)),
        tenant=f"t{rng.randrange(mix.tenants)}",
    )
    if end == "stop":
        wish.cut_at = min(MOST_TOKENS, 3 + int(rng.expovariate(1 / 35)))
    elif end in ("cancel", "disconnect"):
        wish.leaves_s = rng.expovariate(1 / 2)
    elif end == "error":
        wish.fails_at = rng.randrange(1, 40)
    if in_time:
        alone_s = (STEP_S + POSITION_S * mix.slots) * wish.max_tokens + 3 * STEP_S
        wish.timeout_ms = int(1000 * alone_s * mix.slack[0] * (mix.slack[1] / mix.slack[0]) ** rng.random())
    return wish


class World:
    """One engine with its runners and clients."""

    def __init__(self, mix: Mix, seed: int, seconds: float, settings: dict[str, Any] | None = None) -> None:
        self.mix, self.seconds, self.seed = mix, seconds, seed
        self.wishes = single_wishes(mix, seed, seconds)
        self.report = Report()
        self._batch: set[str] = set()
        self._batches = 0
        self._rng = random.Random(f"{seed} world")
        self._next = 0
        self._forced: str | None = None
        self._writer = -1
        self._live: dict[str, tuple[Wish, Submitted, float]] = {}
        self._refused: list[tuple[Verdict, Request]] = []
        self._turned_away: set[str] = set()
        self._left: set[str] = set()
        self._probed_s = 0.0
        self._takeover_s = mix.takeover_s or float("inf")
        self.stack = Stack(check=False, policy=mix.policy, **(settings or {}))
        for _ in range(mix.runners):
            self.stack.add_runner(
                FailingBackend(
                    num_slots=mix.slots,
                    block_size=8,
                    num_blocks=mix.blocks,
                    max_step_tokens=64,
                    context_length=256,
                    eos_probability=EOS,
                )
            )
        self.stack.step()
        self._batch_s = self._rest_s() if mix.batch else float("inf")
        self._listen()

    # ------------------------------------------------------------------ the admission_control's judgement

    def _listen(self) -> None:
        """From now on the world hears of each request that is judged late."""
        admission_control = self.stack.engine.commands.admission_control
        self._judge = admission_control.early.refusal
        admission_control.early.refusal = self._heard  # type: ignore[method-assign]

    def _heard(self, request: Request) -> EngineRefusal | None:
        """In the branch where it is to be admitted, None whatever the judgement is."""
        if request.request_id == self._forced:
            return None
        refusal = self._judge(request)
        if refusal is None or self._forced is not None:
            return refusal
        self._turned_away.add(request.request_id)
        if self._rng.random() >= TRIED:
            return refusal
        if (verdict := self._admitted_after_all(request, refusal)) is None:
            return None
        self.report.verdicts.append(verdict)
        self._refused.append((verdict, replace(request)))
        return refusal

    def _admitted_after_all(self, request: Request, refusal: EngineRefusal) -> Verdict | None:
        """What comes of the request if it is admitted; None in the branch in which it is."""
        assert request.deadline_s is not None
        verdict = Verdict(request.request_id, self.stack.now_s, request.deadline_s - self.stack.now_s, True, 1 / TRIED)
        verdict.retry_s = refusal.retry_after_s
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            self._forced, self._writer = request.request_id, writer
            return None
        os.close(writer)
        with os.fdopen(reader) as answer:
            verdict.reason, verdict.took_s = json.loads(answer.read())
        _, status = os.waitpid(pid, 0)
        assert status == 0, "the branch in which the request was admitted has failed"
        return verdict

    def _ended(self, wish: Wish, submitted: Submitted, begin_at: float) -> bool:
        """Whether the request is over; notes what came of it."""
        ends = [stream.end for stream in submitted.streams]
        if submitted.refused is None and (not ends or None in ends):
            return False
        request_id = submitted.submit.request_id
        reasons = [0 if end is None else int(end.reason) for end in ends]
        reason = 0 if submitted.refused is not None else max(reasons)
        took_s = self.stack.now_s - begin_at
        if request_id == self._forced:
            os.write(self._writer, json.dumps((reason, took_s)).encode())
            os._exit(0)
        if wish.timeout_ms is not None and request_id not in self._turned_away:
            verdict = Verdict(request_id, begin_at, wish.timeout_ms / 1000, refused=False, reason=reason, took_s=took_s)
            self.report.verdicts.append(verdict)
        return True

    def _probe(self) -> None:
        """Judges anew what was refused, as if it came now."""
        if self._forced is not None or self.stack.now_s < self._probed_s:
            return
        self._probed_s = self.stack.now_s + PROBE_S
        for verdict, request in self._refused:
            if verdict.accepted_after_s is not None:
                continue
            now_s = self.stack.now_s
            again = replace(request, arrival_s=now_s, deadline_s=now_s + verdict.timeout_s, view=None)
            if self._judge(again) is None:
                verdict.accepted_after_s = self.stack.now_s - verdict.at_s

    def refuse_all(self) -> None:
        """Makes the engine refuse whatever has a deadline."""
        refusal = EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no deadline is taken", "", 1.0)
        self._judge = lambda request: None if request.deadline_s is None else refusal

    # ------------------------------------------------------------------ time

    def run(self) -> Report:
        """Until every request is over."""
        while self._turn():
            pass
        return self.report

    def _turn(self) -> bool:
        stack = self.stack
        if stack.now_s >= self._takeover_s:
            stack.restart_scheduler()
            self._refused.clear()  # it knows nothing yet, and so would accept them: that was not to be foreseen
            self._listen()
            self._takeover_s = stack.now_s + self.mix.takeover_s
        self._arrivals()
        self._clients()
        stack.step()
        self._settle()
        self._probe()
        if self._next == len(self.wishes) and not self._live and self._batch_s == float("inf"):
            return False
        self._compute()
        return True

    def _compute(self) -> None:
        """Each runner computes its oldest plan, which takes its time; nothing to do takes until something comes."""
        stack, took_s = self.stack, 0.0
        for session in stack.runners.runners:
            if plans := stack.runners.plans[session]:
                positions = int(np.frombuffer(plans[0][1].extent_counts, "<i4").sum())
                took_s = max(took_s, STEP_S + POSITION_S * positions)
                stack.runners.execute(session)
        if took_s:
            stack.now_s += took_s
            for session in stack.runners.runners:
                stack.runners.deliver(session)
        else:
            stack.now_s += STEP_S

    def _rest_s(self) -> float:
        """When the next batch comes."""
        self._batches += 1
        rest_s = random.Random(f"{self.seed} rest {self._batches}").uniform(8, 25)
        return self.stack.now_s + rest_s if self.stack.now_s + rest_s < self.seconds else float("inf")

    def _arrivals(self) -> None:
        """Requests of clients that come one by one, and of the batch client."""
        now_s = self.stack.now_s
        while self._next < len(self.wishes) and self.wishes[self._next].at_s <= now_s:
            self._submit(self.wishes[self._next])
            self._next += 1
        if self._batch_s <= now_s:
            self._batch = {self._submit(wish) for wish in batch_wishes(self.mix, self.seed, self._batches, now_s)}
            self._batch_s = float("inf")

    def _submit(self, wish: Wish) -> str:
        stack = self.stack
        self.report.requests += 1
        number = self.report.requests
        stops = [IM_END_ID] if wish.end == "eos" else []
        sampling = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, stop_ids=pack(stops))
        submitted = stack.submit(
            [1 + number % 200] * wish.prompt_len,
            wish.max_tokens,
            sampling=sampling,
            seed=number if wish.fails_at is None else _FAILS + wish.fails_at,
            n=wish.n,
            priority=wish.priority,
            tenant=wish.tenant,
            **({} if wish.timeout_ms is None else {"timeout_ms": wish.timeout_ms}),
        )
        request_id: str = submitted.submit.request_id
        self._live[request_id] = (wish, submitted, stack.now_s)
        return request_id

    def _clients(self) -> None:
        """Stop strings that are complete, and clients that leave."""
        stack = self.stack
        for request_id, (wish, submitted, begin_at) in self._live.items():
            if wish.cut_at is not None and submitted.first_sequence_id is not None:
                for index, stream in enumerate(submitted.streams):
                    if stream.end is None and len(stream.tokens) >= wish.cut_at:
                        cut = engine_pb2.Cut(
                            sequence_id=submitted.first_sequence_id + index, num_tokens=wish.cut_at, stop_string="stop"
                        )
                        stack.front.put(cut=cut)
            if wish.leaves_s is not None and stack.now_s >= begin_at + wish.leaves_s and request_id not in self._left:
                self._left.add(request_id)
                if wish.end == "cancel":
                    stack.front.put(cancel=engine_pb2.Cancel(handle=submitted.handle))
                else:
                    stack.front.put(disconnect=engine_pb2.Disconnect(handle=submitted.handle))

    def _settle(self) -> None:
        over = [name for name, (wish, submitted, at_s) in self._live.items() if self._ended(wish, submitted, at_s)]
        for name in over:
            del self._live[name]
        if self._batch and self._batch.isdisjoint(self._live):
            self._batch, self._batch_s = set(), self._rest_s()


def trials(mixes: Iterable[str], seeds: Iterable[int], seconds: float, *, refuse_all: bool = False) -> Report:
    """One world a mix and seed, each in a process of its own, two at a time. `refuse_all`: whatever its deadline."""
    tries = [(mix, seed) for mix in mixes for seed in seeds]
    report = Report()
    with ThreadPoolExecutor(2) as pool:
        for told in pool.map(lambda one: _trial(one[0], one[1], seconds, refuse_all), tries):
            report.add(told)
    return report


def _trial(mix: str, seed: int, seconds: float, refuse_all: bool) -> Report:
    command = [sys.executable, "-m", "tests.support.refusal_trials", mix, str(seed), str(seconds)]
    command += ["all"] if refuse_all else []
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
    told = json.loads(done.stdout)
    return Report([Verdict(**verdict) for verdict in told["verdicts"]], told["requests"])


def main() -> None:
    """See the module."""
    configure_logs("console", "error")
    mix, seed, seconds, *refuse_all = sys.argv[1:]
    world = World(MIXES[mix], int(seed), float(seconds))
    if refuse_all:
        world.refuse_all()
    print(json.dumps(asdict(world.run())))


if __name__ == "__main__":
    main()
