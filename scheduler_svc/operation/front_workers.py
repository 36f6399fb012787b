"""The front workers that are connected to one engine: who they are, what all of them are told, and when one is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roster_protos import engine_pb2
from scheduler_svc.operation.status import model_state

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine


class FrontWorkers:
    """Knows each worker by its number in the service and by its ZeroMQ identity, which a new process has anew."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._identities: dict[int, bytes] = {}

    def add(self, number: int, identity: bytes) -> None:
        """A worker says hello, and hears what is served; the former one of this number is gone."""
        former = self._identities.get(number)
        if former is not None and former != identity:
            self.forget(former)
        self._identities[number] = identity
        self._engine.outbox.message(identity, model_state(self._engine))

    def announce(self) -> None:
        """Tells every worker what is served now."""
        self.tell(model_state(self._engine))

    def tell(self, message: engine_pb2.FromEngine) -> None:
        """A message to every worker."""
        for identity in self._identities.values():
            self._engine.outbox.message(identity, message)

    def forget(self, identity: bytes) -> None:
        """A front worker is gone, and with it the streams of its clients, who are not to blame: they may attach."""
        engine = self._engine
        engine.watchers.discard(identity)
        engine.kv_feed.forget(identity)
        self._identities = {number: known for number, known in self._identities.items() if known != identity}
        for request in engine.book.live():
            if request.owner == identity:
                engine.book.abandon(request)
                if request.gone_until_s is None:
                    engine.unattended.orphan(request)
