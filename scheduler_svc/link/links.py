"""What the engine asks of its links: to the front workers, and to the runners.

`FrontLink` and `RunnerLink` do it over ZeroMQ; the simulator has stand-ins on a virtual clock.
"""

from __future__ import annotations

from typing import Protocol

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.link.runner_events import RunnerEvent


class Fronts(Protocol):
    """The link to the front workers. Nothing blocks."""

    def receive(self) -> list[tuple[bytes, engine_pb2.Command]]:
        """All commands that have come, each with the identity of its worker."""

    def send(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        """Sends to one worker; False if it is gone."""


class Runners(Protocol):
    """The link to the runners. Nothing blocks."""

    def receive(self) -> list[RunnerEvent]:
        """All that has come since the last call, in order, then whoever was lost."""

    def welcome(self, session: int) -> None:
        """Opens the session."""

    def resume(self, session: int) -> None:
        """Opens the session with what the runner holds of a former one; GotSnapshot says what that is."""

    def reject(self, session: int, reason: str) -> None:
        """Tells the runner why it can't serve here, and forgets it."""

    def drop(self, session: int, reason: str) -> None:
        """Ends the session; the next `receive` says Lost."""

    def dismiss(self, session: int) -> object:
        """Ends the session without a word."""

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Sends the plan, number by number."""

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        """Sends masks that rows of the plan wait for; nothing happens if the session was lost meanwhile."""
