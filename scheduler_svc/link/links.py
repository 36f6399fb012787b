"""Interfaces of the engine's links to the front workers and to the runners.

`FrontLink` and `RunnerLink` implement them over ZeroMQ, the simulator on a virtual clock.
"""

from __future__ import annotations

from typing import Protocol

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.link.runner_events import RunnerEvent


class Fronts(Protocol):
    """The link to the front workers. No method blocks."""

    def receive(self) -> list[tuple[bytes, engine_pb2.Command]]:
        """Returns all received commands, each with the identity of its worker."""

    def send(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        """Sends to one worker; False if it is gone."""


class Runners(Protocol):
    """The link to the runners. No method blocks."""

    def receive(self) -> list[RunnerEvent]:
        """Returns all events since the last call, in order, then the lost sessions."""

    def welcome(self, session: int, naming_secret: bytes = b"") -> None:
        """Opens the session. With a secret, which names the blocks of the runner's host pool, GotSnapshot reports what
        the pool has kept."""

    def resume(self, session: int, naming_secret: bytes = b"") -> None:
        """Opens the session with the state that the runner holds of a former one; GotSnapshot reports that state."""

    def reject(self, session: int, reason: str) -> None:
        """Rejects the runner with the reason and forgets it."""

    def drop(self, session: int, reason: str) -> None:
        """Ends the session; the next `receive` reports Lost."""

    def dismiss(self, session: int) -> object:
        """Ends the session without an event."""

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Sends the plan; numbers are consecutive."""

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        """Sends masks that rows of the plan wait for; a no-op if the session is lost."""

    def send_move(self, session: int, message: plan_pb2.ToRunner) -> None:
        """Sends a grant, a pull, a revoke or a dismissal, which may be lost; a no-op if the session is lost."""
