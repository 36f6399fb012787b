"""Clients of a `Mix` against the engine and hash runners, on a simulated clock.

Whenever the engine would refuse a request for its deadline, the world forks. In one branch the request is refused and
the simulation continues. In the other it is admitted and simulated until it ends. After the refusal, the same request
is evaluated again as time passes, without being sent, to find the first time at which it would have been accepted. Some
of the refused clients do retry after the delay in their refusal; their requests are handled like any other.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.model.sequence import Request
from scheduler_svc.plan.plan_draft import pack
from tests.support.in_process import Stack, Submitted
from tests.support.refusal_mixes import EOS, POSITION_S, STEP_S, Mix, Wish, batch_wishes, single_wishes
from tests.support.refusal_verdicts import Report, Verdict

TRIED = 0.5
"""Fraction of refusals that are tried by admitting the request in a fork."""
RETURNING = 0.5
"""Fraction of refused clients that retry after the delay in their refusal."""
PROBE_S = 0.1
"""Seconds between evaluations of a refused request."""
_FAILS = 1 << 40
"""Added to a seed: the row fails at the token whose number is the remainder."""


class FailingBackend(HashBackend):
    """Hash backend on which a row whose seed encodes a token number fails at that token."""

    def _finite(self, batch: StepBatch, rows: Any, positions: Any) -> Any:
        finite = np.ones(len(rows), np.bool_)
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            seed = int(batch.params[row]["seed"])
            generated = position - batch.states[row].prompt_len
            finite[index] = not (_FAILS <= seed < 2 * _FAILS and generated >= seed - _FAILS)
        return finite


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
        self._patience = random.Random(f"{seed} patience")
        self._returns: list[Wish] = []
        self._forced: str | None = None
        self._writer = -1
        self._live: dict[str, tuple[Wish, Submitted, float]] = {}
        self._refused: list[tuple[Verdict, Request]] = []
        self._turned_away: set[str] = set()
        self._promised: set[str] = set()
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

    # ------------------------------------------------------------------ admission control's decisions

    def _listen(self) -> None:
        """Intercepts each decision of admission control about a deadline."""
        doorkeeper = self.stack.engine.commands.admission_control
        self._judge = doorkeeper.early.refusal
        doorkeeper.early.refusal = self._heard  # type: ignore[method-assign]

    def _heard(self, request: Request) -> EngineRefusal | None:
        """Decides as admission control does, except that a forked branch admits its request whatever the decision."""
        if request.request_id == self._forced:
            return None
        refusal = self._judge(request)
        if refusal is None:
            self._note_promise(request)
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

    def _note_promise(self, request: Request) -> None:
        """Records whether the same request would be refused now for a client without a reservation."""
        stranger = replace(request, cache_salt="stranger", place_at=None, view=None)
        if self._judge(stranger) is not None:
            self._promised.add(request.request_id)

    def _admitted_after_all(self, request: Request, refusal: EngineRefusal) -> Verdict | None:
        """Returns what happens if the request is admitted; returns None in the forked branch, which admits it."""
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

    def _ended(self, wish: Wish, submitted: Submitted, begin_s: float) -> bool:
        """Returns whether the request is over, and records how it ended."""
        ends = [stream.end for stream in submitted.streams]
        if submitted.refused is None and (not ends or None in ends):
            return False
        request_id = submitted.submit.request_id
        reasons = [0 if end is None else int(end.reason) for end in ends]
        reason = 0 if submitted.refused is not None else max(reasons)
        took_s = self.stack.now_s - begin_s
        if request_id == self._forced:
            os.write(self._writer, json.dumps((reason, took_s)).encode())
            os._exit(0)
        if wish.timeout_ms is not None and request_id not in self._turned_away:
            verdict = Verdict(request_id, begin_s, wish.timeout_ms / 1000, refused=False, reason=reason, took_s=took_s)
            verdict.promised = request_id in self._promised
            self.report.verdicts.append(verdict)
        return True

    def _probe(self) -> None:
        """Evaluates the refused requests again, as if they arrived now."""
        if self._forced is not None or self.stack.now_s < self._probed_s:
            return
        self._probed_s = self.stack.now_s + PROBE_S
        for verdict, request in self._refused:
            if verdict.accepted_after_s is not None:
                continue
            now_s = self.stack.now_s
            again = replace(request, arrival_s=now_s, deadline_s=now_s + verdict.timeout_s, place_at=None, view=None)
            if self._judge(again) is None:
                verdict.accepted_after_s = self.stack.now_s - verdict.at_s

    def _came_back(self, first_id: str) -> None:
        """Records that a request refused under this id was sent again and is now accepted."""
        for verdict, _ in self._refused:
            if verdict.request_id == first_id and verdict.accepted_after_s is None:
                verdict.accepted_after_s = self.stack.now_s - verdict.at_s

    def refuse_all(self) -> None:
        """Makes the engine refuse every request with a deadline."""
        refusal = EngineRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no deadline is taken", "", 1.0)
        self._judge = lambda request: None if request.deadline_s is None else refusal

    # ------------------------------------------------------------------ time

    def run(self) -> Report:
        """Runs until every request is over."""
        while self._turn():
            pass
        return self.report

    def _turn(self) -> bool:
        stack = self.stack
        if stack.now_s >= self._takeover_s:
            stack.restart_scheduler()
            self._refused.clear()  # a new scheduler would accept them, which a refusal cannot foresee
            self._listen()
            self._takeover_s = stack.now_s + self.mix.takeover_s
        self._arrivals()
        self._clients()
        stack.step()
        self._settle()
        self._probe()
        if self._next == len(self.wishes) and not self._live and not self._returns and self._batch_s == float("inf"):
            return False
        self._compute()
        return True

    def _compute(self) -> None:
        """Lets each runner compute its oldest plan and advances time by its duration, or by one step if idle."""
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
        """Returns the time at which the next batch arrives."""
        self._batches += 1
        rest_s = random.Random(f"{self.seed} rest {self._batches}").uniform(8, 25)
        return self.stack.now_s + rest_s if self.stack.now_s + rest_s < self.seconds else float("inf")

    def _arrivals(self) -> None:
        """Submits the requests that are due: of single clients, of returning clients and of the batch client."""
        now_s = self.stack.now_s
        while self._next < len(self.wishes) and self.wishes[self._next].at_s <= now_s:
            self._submit(self.wishes[self._next])
            self._next += 1
        for wish in [wish for wish in self._returns if wish.at_s <= now_s]:
            self._returns.remove(wish)
            self._submit(wish)
        if self._batch_s <= now_s:
            self._batch = {self._submit(wish) for wish in batch_wishes(self.mix, self.seed, self._batches, now_s)}
            self._batch_s = float("inf")

    def _submit(self, wish: Wish) -> str:
        stack = self.stack
        self.report.requests += 1
        number = wish.number = wish.number or self.report.requests
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
        """Reports completed stop strings and lets clients leave."""
        stack = self.stack
        for request_id, (wish, submitted, begin_s) in self._live.items():
            if wish.cut_at is not None and submitted.first_sequence_id is not None:
                for index, stream in enumerate(submitted.streams):
                    if stream.end is None and len(stream.tokens) >= wish.cut_at:
                        cut = engine_pb2.Cut(
                            sequence_id=submitted.first_sequence_id + index, num_tokens=wish.cut_at, stop_string="stop"
                        )
                        stack.front.put(cut=cut)
            if wish.leaves_s is not None and stack.now_s >= begin_s + wish.leaves_s and request_id not in self._left:
                self._left.add(request_id)
                if wish.end == "cancel":
                    stack.front.put(cancel=engine_pb2.Cancel(handle=submitted.handle))
                else:
                    stack.front.put(disconnect=engine_pb2.Disconnect(handle=submitted.handle))

    def _settle(self) -> None:
        for wish, submitted, _ in self._live.values():
            if wish.first_id and submitted.first_sequence_id is not None:
                self._came_back(wish.first_id)
                wish.first_id = ""
        over = [name for name, (wish, submitted, at_s) in self._live.items() if self._ended(wish, submitted, at_s)]
        for name in over:
            wish, submitted, _ = self._live.pop(name)
            self._consider(wish, submitted)
        if self._batch and self._batch.isdisjoint(self._live):
            self._batch, self._batch_s = set(), self._rest_s()

    def _consider(self, wish: Wish, submitted: Submitted) -> None:
        """Lets a refused client retry after the delay in its refusal, with probability `RETURNING`."""
        refused = submitted.refused
        if refused is None or not refused.retry_after_ms or wish.timeout_ms is None:
            return
        if self._patience.random() < RETURNING:
            at_s = self.stack.now_s + refused.retry_after_ms / 1000
            self._returns.append(replace(wish, at_s=at_s, first_id=wish.first_id or submitted.submit.request_id))
