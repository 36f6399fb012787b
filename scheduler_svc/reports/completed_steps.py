"""Pairs what is told of a step when it is sent with what is told when its result comes."""

from __future__ import annotations

from roster_protos import admin_pb2, engine_pb2

STEPS_HELD = 1024
"""Steps held until their result comes; beyond it the oldest is given up (its runner went away)."""


class CompletedSteps:
    """Holds the reports of steps in flight, by runner and number."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], admin_pb2.WatchStepsResponse] = {}

    def sent(self, report: admin_pb2.WatchStepsResponse) -> None:
        """A step was sent. A runner that joined again counts from 1: its earlier steps are replaced."""
        self._sent[report.runner, report.number] = report
        if len(self._sent) > STEPS_HELD:
            del self._sent[next(iter(self._sent))]

    def done(self, step: engine_pb2.StepDone) -> admin_pb2.WatchStepsResponse | None:
        """Its result came: the report with its times, a copy; None if nobody watched when it was sent."""
        report = self._sent.pop((step.runner, step.number), None)
        if report is None:
            return None
        whole = admin_pb2.WatchStepsResponse()
        whole.CopyFrom(report)
        whole.done_s, whole.run_s = step.done_s, step.run_s
        return whole
