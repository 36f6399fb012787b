"""Simulated clients: they submit the trace's requests on time, and record when each token arrives.

The class replaces `FrontLink`, with the same methods but without sockets. All requests come through one front worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from roster_protos import admin_pb2, engine_pb2, plan_pb2
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.reports.completed_steps import CompletedSteps
from scheduler_svc.simulator.conversations.contexts import Contexts
from scheduler_svc.simulator.conversations.turn import Turn
from scheduler_svc.simulator.conversations.turn_times import TurnTimes
from scheduler_svc.simulator.prompts import blank_prompt, content_tokens, prompt_tokens
from scheduler_svc.simulator.simulated_runners import STOP_TOKEN, TOKEN
from scheduler_svc.simulator.trace import Trace, TraceRequest
from scheduler_svc.simulator.virtual_clock import VirtualClock

WORKER = b"simulated"


class SimulatedFront:
    """Clients of one trace. Requests are identified by their index in the trace; a handle is the index + 1."""

    def __init__(
        self,
        trace: Trace,
        clock: VirtualClock,
        front_s: float,
        vocab_size: int,
        real_prompts: bool,
        hints: bool = True,
    ) -> None:
        """`front_s` is the one-way time between client and engine in seconds. `real_prompts` gives prompts content.
        `hints`: whether clients send ids of conversations, and when they come back."""
        self._hints = hints
        self.trace = trace
        self._clock = clock
        self._front_s = front_s
        self._vocab_size = vocab_size
        self._real_prompts = real_prompts
        turns = [request.turn for request in trace.requests]
        self._times = TurnTimes([request.arrival_s for request in trace.requests], turns)
        self._contexts = Contexts(turns, lambda content, count: content_tokens(content, count, vocab_size))
        self._num_submitted = 0
        self._index_of: dict[int, int] = {}  # of the sequences of turns under way
        self._over: list[int] = []  # turns that ended, or were refused, in this turn of the engine
        self._greeting = [(WORKER, engine_pb2.Command(hello=engine_pb2.WorkerHello(worker=0)))]
        self.first_ids = np.zeros(len(trace.requests), np.uint64)
        """Internal id of each request's sequence; 0 if it was not accepted."""
        self.refusals: dict[int, str] = {}
        self.num_ended = 0
        self.cached_of: dict[int, int] = {}
        """Sequence id -> tokens of its prompt that came from the prefix cache, for sequences that have ended."""
        self.ended_early: dict[int, str] = {}
        """Sequence id -> reason, for sequences that ended with neither STOP nor LENGTH."""
        self.token_ids = bytearray()
        """Sequence id of each received token, uint64."""
        self.token_times_s = array("d")
        self.token_counts = array("q")
        """Number of tokens received at each of `token_times_s`."""
        self.on_step: Callable[[admin_pb2.WatchStepsResponse], None] | None = None
        """Receives each completed step, if this worker is one of the engine's watchers."""
        self._completed = CompletedSteps()

    # ------------------------------------------------------------------ as the engine sees it

    def receive(self) -> list[tuple[bytes, engine_pb2.Command]]:
        """Returns commands for the requests that have arrived by now."""
        commands, self._greeting = self._greeting, []
        while self.next_s <= self._clock.now_s:
            commands.append((WORKER, engine_pb2.Command(submit=self._submit(self._times.pop()))))
            self._num_submitted += 1
        return commands

    def send(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        """Records a message that the engine publishes."""
        step = message.step  # empty in any other message
        ids = step.sequence_ids
        if ids:
            self.token_ids += ids
            self.token_counts.append(len(ids) // 8)
        if step.ends:
            self._take_ends(step)
        elif not ids:
            self._take_answer(message)
        return True

    # ------------------------------------------------------------------ as the simulation sees it

    @property
    def share_done(self) -> float:
        """Mean of the shares of requests that have arrived and that have ended, 0 to 1."""
        return (self._num_submitted + self.num_ended) / max(1, 2 * len(self.trace.requests))

    @property
    def next_s(self) -> float:
        """Time at which the next request reaches the engine; infinite if none is due."""
        return self._times.next_s + self._front_s

    @property
    def arrival_s(self) -> npt.NDArray[np.float64]:
        """Arrival of each request, in seconds; NaN for a turn that is not due yet."""
        return self._times.arrival_s

    @property
    def done(self) -> bool:
        """Whether every request has been refused or has ended."""
        return self.num_ended + len(self.refusals) == len(self.trace.requests)

    def stamp(self) -> None:
        """Records that the tokens published in this turn leave the engine now."""
        arrival_s = self._clock.now_s + self._front_s
        for _ in range(len(self.token_counts) - len(self.token_times_s)):
            self.token_times_s.append(arrival_s)
        for index in self._over:
            self._times.ended(index, arrival_s)
        self._over.clear()

    def stamp_each(self, times_s: list[float]) -> None:
        """Records that the tokens of several turns left the engine at these times, one per turn."""
        self.token_times_s.extend([time_s + self._front_s for time_s in times_s])

    def _take_answer(self, message: engine_pb2.FromEngine) -> None:
        if message.HasField("accepted"):
            index, first_id = message.accepted.handle - 1, message.accepted.first_sequence_id
            self.first_ids[index] = first_id
            if self.trace.requests[index].turn is not None:
                self._index_of[first_id] = index
        elif message.HasField("refused"):
            index = message.refused.handle - 1
            self.refusals[index] = message.refused.message
            self._over.append(index)
        elif message.HasField("step_report"):
            self._completed.sent(message.step_report)
        elif message.HasField("step_done"):
            report = self._completed.done(message.step_done)
            if report is not None and self.on_step is not None:
                self.on_step(report)

    def _take_ends(self, step: engine_pb2.Step) -> None:
        for end in step.ends:
            self.num_ended += 1
            self.cached_of[end.sequence_id] = end.cached_tokens
            index = self._index_of.pop(end.sequence_id, None)
            if index is not None:
                self._contexts.output(index, _output(self.trace.requests[index]))
                self._over.append(index)
            if end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                self.ended_early[end.sequence_id] = end.message or FinishReason(end.reason).name

    def _submit(self, index: int) -> engine_pb2.Submit:
        request = self.trace.requests[index]
        if request.turn is not None:
            prompt = self._contexts.prompt(index)
        elif self._real_prompts:
            prompt = prompt_tokens(self.trace, index, self._vocab_size)
        else:
            prompt = blank_prompt(request)
        submit = engine_pb2.Submit(
            handle=index + 1,
            tenant=request.tenant,
            request_id=str(index),
            prompt=prompt.tobytes(),
            sampling=_sampling(request),
            n=1,
            seed=0,
            max_tokens=request.max_tokens or request.output_tokens,
            priority=request.priority,
        )
        if request.turn is not None and self._hints:
            _add_hints(submit, request.turn)
        if request.ttft_target_ms is not None:
            submit.ttft_target_ms = request.ttft_target_ms
        if request.itl_target_ms is not None:
            submit.itl_target_ms = request.itl_target_ms
        return submit


def early_stops(trace: Trace) -> dict[str, int]:
    """Returns the output lengths of the requests that end before their `max_tokens`, by request id."""
    return {
        str(index): request.output_tokens
        for index, request in enumerate(trace.requests)
        if (request.max_tokens or request.output_tokens) > request.output_tokens
    }


def _add_hints(submit: engine_pb2.Submit, turn: Turn) -> None:
    submit.conversation_id = turn.conversation
    if turn.next_turn_s is not None:
        submit.next_turn_s = turn.next_turn_s
    if turn.retain_s is not None:
        submit.kv_retain_s = turn.retain_s


def _output(request: TraceRequest) -> npt.NDArray[np.int32]:
    """Returns the tokens that a simulated runner samples for the request, int32."""
    tokens = np.full(request.output_tokens, TOKEN, np.int32)
    if (request.max_tokens or request.output_tokens) > request.output_tokens:
        tokens[-1] = STOP_TOKEN
    return tokens


def _sampling(request: TraceRequest) -> plan_pb2.Sampling:
    if (request.max_tokens or request.output_tokens) > request.output_tokens:
        return plan_pb2.Sampling(top_p=1, repetition_penalty=1, stop_ids=pack([STOP_TOKEN]))
    return plan_pb2.Sampling(top_p=1, repetition_penalty=1)
