"""Front workers connected to one engine: their identities, broadcasts to them, and their loss."""

from __future__ import annotations

from collections.abc import Callable

from roster_protos import engine_pb2
from scheduler_svc.failure.disconnected_requests import DisconnectedRequests
from scheduler_svc.requests.requests import Requests


class FrontWorkers:
    """Registry of the front workers: sends them the model state and handles their loss.

    A worker has a number in the service and a ZeroMQ identity that is new for each process.
    """

    def __init__(
        self,
        requests: Requests,
        disconnected: DisconnectedRequests,
        model_state: Callable[[], engine_pb2.FromEngine],
        when_gone: Callable[[bytes], None],
    ) -> None:
        """`model_state` builds the message that describes the service; `when_gone` is called with each lost worker."""
        self._requests = requests
        self._disconnected = disconnected
        self._model_state = model_state
        self._when_gone = when_gone
        self._identities: dict[int, bytes] = {}

    def add(self, number: int, identity: bytes) -> None:
        """Registers a worker and sends it the model state. A former worker of this number counts as lost."""
        former = self._identities.get(number)
        if former is not None and former != identity:
            self.forget(former)
        self._identities[number] = identity
        self._requests.outbox.message(identity, self._model_state())

    def announce(self) -> None:
        """Sends every worker the current model state."""
        self.broadcast(self._model_state())

    def broadcast(self, message: engine_pb2.FromEngine) -> None:
        """Sends a message to every worker."""
        for identity in self._identities.values():
            self._requests.outbox.message(identity, message)

    def forget(self, identity: bytes) -> None:
        """Handles the loss of a front worker: its clients lose their streams and may attach again."""
        self._when_gone(identity)
        self._identities = {number: known for number, known in self._identities.items() if known != identity}
        for request in self._requests.book.live():
            if request.owner == identity:
                self._requests.book.abandon(request)
                if request.gone_until_at is None:
                    self._disconnected.detach(request)
