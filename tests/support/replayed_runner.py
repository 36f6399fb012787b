"""A runner of an earlier version, as the scheduler sees it: it sends the recorded messages, byte for byte.

A real runner of the present version executes every plan in the background. Its results are sent from the first plan on
that differs from the recorded one, so that a scheduler may plan differently from the recorded version; `replayed`
counts the recorded results sent.
"""

from __future__ import annotations

import zmq

from roster_protos import plan_pb2
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from tests.support.recorded_frames import Frame, RecordedSchema

KNOWN_FLAGS = 3
"""Flags of extents that every version knows."""


class ReplayedRunner:
    """Sends messages for `runner`, which has executed everything that the scheduler sent before `frames`."""

    def __init__(self, endpoint: str, runner: Runner, frames: list[Frame], schema: RecordedSchema) -> None:
        """`frames`: one session's frames, starting with its Hello."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._runner = runner
        self._schema = schema
        said = [frame.to_scheduler for frame in frames if frame.from_runner]
        heard = [frame.to_runner for frame in frames if not frame.from_runner]
        self._hello = next(message for message in said if message.HasField("hello"))
        self._others = {message.WhichOneof("body"): message for message in said}
        self._results = {message.number: message for message in said if message.HasField("result")}
        self._plans = {message.number: message.plan for message in heard if message.HasField("plan")}
        self._session = 0
        self._launched: list[LaunchedPlan] = []
        self._as_recorded = True
        self.replayed = 0
        """Number of recorded results sent."""
        self.heard: set[str] = set()
        """Kinds of messages received."""
        self._socket.send(self._hello.SerializeToString())

    def turn(self) -> None:
        """Answers the messages received."""
        while self._socket.poll(0):
            frame = self._socket.recv()
            assert self._schema.unknown("ToRunner", frame) == [], (
                "the scheduler sent fields that this version does not know"
            )
            self._take(plan_pb2.ToRunner.FromString(frame))
        while self._launched and not self._launched[0].awaits_masks:
            self._finish(self._launched.pop(0))

    def say(self, kind: str) -> None:
        """Sends the recorded message of that kind."""
        self._send(self._others[kind])

    def close(self) -> None:
        """Closes the socket."""
        self._context.destroy(linger=0)

    def _take(self, message: plan_pb2.ToRunner) -> None:
        kind = message.WhichOneof("body")
        self.heard.add(str(kind))
        if kind == "welcome":
            self._session = message.session
            self._runner.resume() if message.welcome.resume else self._runner.reset()
        elif kind == "plan":
            assert not message.plan.extent_flags or max(message.plan.extent_flags) <= KNOWN_FLAGS
            recorded = self._plans.get(message.number)
            self._as_recorded = self._as_recorded and recorded is not None and _rows(recorded) == _rows(message.plan)
            self._launched.append(self._runner.launch(message.number, message.plan))
        elif kind == "masks":
            for plan in self._launched:
                if plan.number == message.number:
                    plan.mask(message.masks)
        elif kind == "snapshot_request":
            self.say("snapshot")
        elif kind == "ping":
            pong = plan_pb2.Pong(last_plan=self._runner.last_plan)
            self._send(plan_pb2.ToScheduler(number=message.number, pong=pong))

    def _finish(self, plan: LaunchedPlan) -> None:
        result = plan.wait()
        if self._as_recorded:
            self.replayed += 1
            self._send(self._results[plan.number])
        else:
            self._send(plan_pb2.ToScheduler(number=plan.number, result=result))

    def _send(self, message: plan_pb2.ToScheduler) -> None:
        message.session = self._session
        self._socket.send(message.SerializeToString())


def _rows(plan: plan_pb2.Plan) -> tuple[object, ...]:
    """Returns the part of a plan that determines what it computes: releases, admissions and extents."""
    admitted = [(a.slot, a.tokens, a.num_computed, a.seed, a.sample_index) for a in plan.admissions]
    return (plan.releases, admitted, plan.extent_slots, plan.extent_starts, plan.extent_counts, plan.extent_flags)
