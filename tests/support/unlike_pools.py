"""Random walks over unlike runners that come, go and are replaced: each request ends correctly or with a reason.

The walks use the real engine, schedulers and hash runners. `settings.check` verifies the scheduler's invariants after
each plan; at the end, each stream is compared with its slow twin.
"""

from __future__ import annotations

import random
from collections import Counter

import grpc

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.model.suspicion import LONE_LOSSES, STRIKES
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import VictimChoice, available_policies
from scheduler_svc.settings.tenant_limits import TenantLimits
from tests.support.constraints import CONSTRAINTS, allowed_after
from tests.support.in_process import Stack, Stream, Submitted
from tests.support.policies import policy_named

BLOCK_SIZE = 4
EOS_PROBABILITY = 1 / 48
STOP_IDS = [IM_END_ID, 7]
STEM = [0, 1, 2, 3, 3, 2, 1, 0] * 4
MOST_TURNS = 6000
"""Turns within which everything must have ended: several times what the longest load takes one sequence at a time."""
TURN_S = 0.05
MODEL = HashBackend(context_length=256).model


class Hung(AssertionError):
    """Raised when a request did not end."""


def pool_backend(
    num_blocks: int,
    slots: int = 2,
    context_length: int = 256,
    max_step_tokens: int = 16,
    eos_probability: float = EOS_PROBABILITY,
) -> HashBackend:
    """Returns a runner's backend whose pool has `num_blocks` blocks of `BLOCK_SIZE` tokens."""
    return HashBackend(
        num_slots=slots,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        context_length=context_length,
        eos_probability=eos_probability,
    )


def limit_of(request: Submitted) -> int:
    """Returns the maximum length in tokens of each of its sequences, prompt included."""
    return len(request.submit.prompt) // 4 + request.submit.max_tokens


class JudgedStack(Stack):
    """Stack that checks after each step that no sequence was given up or refused while a runner could hold it."""

    def _holding(self, num_tokens: int) -> set[int]:
        """Returns the sessions of open runners that hold `num_tokens` tokens of one sequence."""
        placement, found = self.engine.placement, set()
        for session, scheduler in self.engine.pool.schedulers.items():
            hello = scheduler.hello
            fits = num_tokens <= min(hello.num_blocks * hello.block_size + 1, hello.model.context_length)
            if fits and not scheduler.leaving and session not in placement._closed:
                found.add(session)
        return found

    def step(self) -> None:
        before = [
            (request, self._holding(limit_of(request)), [stream for stream in request.streams if not stream.end])
            for request in self.unfinished()
        ]
        super().step()
        for request, holding, streams in before:
            kept = holding & self._holding(limit_of(request))
            if request.refused is not None and request.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
                assert not kept, f"refused although runners {kept} can hold it: {request.refused.message}"
            for stream in streams:
                if stream.end is not None and "that holds" in stream.end.message:
                    assert not kept, f"given up although runners {kept} can hold it: {stream.end.message}"

    def unfinished(self) -> list[Submitted]:
        """Returns the requests whose end the client has not received."""
        return [
            request
            for request in self.requests.values()
            if request.refused is None and not (request.streams and all(stream.end for stream in request.streams))
        ]


class PoolWalk:
    """One random walk, determined by its seed."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self.stack = JudgedStack(
            depth=rng.randint(1, 3),
            policy=rng.choice(available_policies()),
            policy_parameters={"victim": rng.choice(list(VictimChoice))},
            prefix_sharing=rng.random() < 2 / 3,
            tenant_limits={"a": TenantLimits.model_validate({"running": rng.choice([None, 2])})},
            no_runner_s=rng.choice([0.5, 2.0, 6.0]),
        )
        self._losses = 0  # losses that may count against one request
        self._sizes: set[int] = set()  # maximum tokens of one sequence on each runner
        self._drained = False
        self._cancelled: set[int] = set()
        self.outcomes: Counter[str] = Counter()
        """Number of streams by outcome: "whole", or the finish reason or status that the client received."""
        for _ in range(rng.randint(1, 3)):
            self._add()
        self.stack.step()

    @property
    def num_requests(self) -> int:
        """Number of requests sent."""
        return len(self.stack.requests)

    @property
    def num_hung(self) -> int:
        """Number of requests whose end the client has not received."""
        return len(self.stack.unfinished())

    def go(self) -> PoolWalk:
        """Walks, then lets everything end. Raises Hung, or AssertionError where an end is wrong."""
        actions = {
            self._submit: 14, self._turns: 16, self._pass_time: 2, self._add: 2, self._replace: 3, self._leave: 2,
            self._kill: 1, self._restart: 0.7, self._swap: 1, self._cancel: 1, self._fall_ill: 2,
        }  # fmt: skip
        for action in self._rng.choices(list(actions), list(actions.values()), k=self._rng.randint(30, 70)):
            action()
        self._finish()
        for request in self.stack.requests.values():
            self._compare(request)
        return self

    # ------------------------------------------------------------------ events

    def _submit(self) -> None:
        rng, tenant = self._rng, self._rng.choice(["", "", "a"])
        length = rng.choice([rng.randint(1, 12), rng.randint(1, 60)])
        stemmed = rng.random() < 0.5
        prompt = [*[*STEM, *STEM][: length - 1], rng.randrange(4)] if stemmed else rng.choices(range(4), k=length)
        sampling = plan_pb2.Sampling(
            temperature=rng.choice([0.0, 1.0]), top_p=1, repetition_penalty=1, stop_ids=pack(STOP_IDS)
        )
        if rng.random() < 0.15:
            sampling.logprobs = 1
        fields: dict[str, object] = {"tenant": tenant, "priority": rng.choice([0, 0, 5, -5]), "seed": rng.randrange(9)}
        if rng.random() < 0.2:
            fields["timeout_ms"] = rng.randint(100, 8000)
        constraint = rng.choice(CONSTRAINTS) if rng.random() < 0.08 else None
        if constraint is not None:
            fields["grammar"] = grammar_text(*constraint)
        max_tokens = rng.choice([rng.randint(1, 12), rng.randint(1, 100)])
        usual = self.stack.model.usual_tokens if self.stack.model is not None else 0
        if rng.random() < 0.15 and usual > length:
            max_tokens, fields["open_ended"] = usual - length, True
        request = self.stack.submit(prompt, max_tokens, n=rng.choice([1, 1, 2]), sampling=sampling, **fields)
        if constraint is not None:
            request.allowed = allowed_after(MODEL, *constraint, stop_ids=STOP_IDS)

    def _turns(self) -> None:
        for _ in range(self._rng.randint(1, 40)):
            self.stack.turn(self._rng)
        self.stack.now_s += TURN_S

    def _pass_time(self) -> None:
        self.stack.now_s += self._rng.uniform(0.1, 3)

    def _add(self) -> None:
        if len(self.stack.runners.runners) < 4:
            rng, slots = self._rng, self._rng.randint(1, 4)
            context_length = rng.choice([32, 64, 128, 256, 256])
            backend = pool_backend(rng.randint(3, 48), slots, context_length, rng.randint(slots, 24))
            self.stack.add_runner(backend)
            self._sizes.add(min(backend.num_blocks * BLOCK_SIZE + 1, context_length))

    def _some_runner(self) -> int | None:
        return self._rng.choice(sorted(self.stack.runners.runners)) if self.stack.runners.runners else None

    def _leave(self) -> None:
        if (session := self._some_runner()) is not None:
            self.stack.runners.leave(session)

    def _kill(self) -> None:
        if (session := self._some_runner()) is not None:
            self.stack.runners.kill(session)
            self._losses += 1

    def _fall_ill(self) -> None:
        """Makes a runner answer its next plans, probes included, with a fault each; then it recovers.

        However long that takes, it costs a request at most one loss: after the first fault, the runner computes only
        probes.
        """
        if (session := self._some_runner()) is not None:
            ill, runner = self.stack.runners.ill, self.stack.runners.runners[session]
            self._losses += not ill.get(runner)
            ill[runner] = self._rng.choice([1, 2, 5, 20])

    def _replace(self) -> None:
        self._rng.choice([self._leave, self._kill])()
        self._add()

    def _restart(self) -> None:
        self.stack.restart_scheduler()

    def _swap(self) -> None:
        self.stack.engine.change_policy(policy_named(self._rng.choice(available_policies())))

    def _cancel(self) -> None:
        if self.stack.requests:
            handle = self._rng.choice(sorted(self.stack.requests))
            self._cancelled.add(handle)
            self.stack.front.put(cancel=engine_pb2.Cancel(handle=handle))

    # ------------------------------------------------------------------ the end

    def _finish(self) -> None:
        stack = self.stack
        if not stack.runners.runners and stack.restarts:  # until a new scheduler knows a model, its clients keep asking
            self._add()
        self._drained = self._rng.random() < 0.15 and not stack.restarts
        if self._drained:
            stack.engine.shutdown.begin(self._rng.uniform(0, 5))
        for _ in range(MOST_TURNS):
            stack.whole_turn(*stack.runners.runners, turn_s=TURN_S, most_plans=1)
            if self._drained and stack.engine.shutdown.is_due:
                stack.engine.shutdown.finish()
            if stack.engine.requests.idle and not stack.front.commands and not stack.runners.events:
                stack.step()
                stack.step()
                assert not stack.engine.quarantine.active and not len(stack.engine.placement.misfits)
                return stack.assert_clean()
        hung = [request.submit.request_id for request in stack.unfinished()]
        raise Hung(f"{hung} never ended; {len(stack.engine.requests.queue)} sequences wait")

    def _compare(self, request: Submitted) -> None:
        if request.refused is not None:
            self._check_refusal(request, grpc_name(request.refused.code))
        elif len(request.streams) < request.submit.n or not all(stream.end for stream in request.streams):
            raise Hung(f"{request.submit.request_id} never ended")
        for index, stream in enumerate(request.streams):
            expected = request.expected(index, EOS_PROBABILITY)
            assert stream.tokens == expected[: len(stream.tokens)], request.submit.request_id
            if stream.end is not None:
                self._check_end(request, stream, expected)

    def _check_refusal(self, request: Submitted, status: str) -> None:
        assert request.refused is not None and request.refused.message
        allowed = {
            "INVALID_ARGUMENT": "can never fit" in request.refused.message,
            "RESOURCE_EXHAUSTED": request.submit.HasField("timeout_ms"),
            "UNAVAILABLE": self._drained or "no runner" in request.refused.message,
            "INTERNAL": self._losses >= STRIKES + LONE_LOSSES,
        }
        assert allowed.get(status), f"{request.submit.request_id}: {status} {request.refused.message}"
        self.outcomes[status] += request.submit.n

    def _check_end(self, request: Submitted, stream: Stream, expected: list[int]) -> None:
        assert stream.end is not None
        reason = FinishReason(stream.end.reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            cut = reason is FinishReason.LENGTH and request.submit.open_ended
            begun = len(request.submit.prompt) // 4
            is_full = cut and not self._sizes.isdisjoint({begun + len(stream.tokens), begun + stream.end.num_tokens})
            assert stream.tokens == expected or is_full, request.submit.request_id
            self.outcomes["whole"] += 1
            return
        allowed = {
            FinishReason.DEADLINE: request.submit.HasField("timeout_ms"),
            FinishReason.CANCELLED: request.handle in self._cancelled,
            FinishReason.UNAVAILABLE: bool(stream.end.message),
            FinishReason.ERROR: request.refused is not None,
        }
        assert allowed[reason], f"{request.submit.request_id}: {reason.name} {stream.end.message}"
        if request.refused is None:
            self.outcomes[reason.name] += 1


def grpc_name(code: int) -> str:
    """Returns the name of a gRPC status code."""
    return next(status.name for status in grpc.StatusCode if status.value[0] == code)
