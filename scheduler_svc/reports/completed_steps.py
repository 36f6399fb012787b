"""Pairs the report of a sent step with the times of its result."""

from __future__ import annotations

from roster_protos import admin_pb2, engine_pb2

STEPS_HELD = 1024
"""Maximum number of steps kept until their result arrives. Beyond it the oldest is dropped: its runner is probably
gone."""


class CompletedSteps:
    """Reports of steps in flight, by runner and number."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], admin_pb2.WatchStepsResponse] = {}

    def sent(self, report: admin_pb2.WatchStepsResponse) -> None:
        """Records a step that was sent. A runner that rejoins counts from 1 again and replaces its earlier steps."""
        self._sent[report.runner, report.number] = report
        if len(self._sent) > STEPS_HELD:
            del self._sent[next(iter(self._sent))]

    def done(self, step: engine_pb2.StepDone) -> admin_pb2.WatchStepsResponse | None:
        """Returns a copy of the step's report with the times and drafts of its result.

        None if the step was sent unwatched.
        """
        report = self._sent.pop((step.runner, step.number), None)
        if report is None:
            return None
        whole = admin_pb2.WatchStepsResponse()
        whole.CopyFrom(report)
        whole.done_s, whole.run_s = step.done_s, step.run_s
        for row, drafted, accepted in zip(whole.rows, step.drafted, step.accepted, strict=False):  # both may be empty
            row.drafted, row.accepted = drafted, accepted
        return whole
