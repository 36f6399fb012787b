"""The end of the service: nothing new is taken, what lives gets its time, the rest is ended and workers are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roster_protos import engine_pb2
from scheduler_svc.sequence import End, FinishReason

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine


class Shutdown:
    """Carries out the `Drain` of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def begin(self, seconds: float | None = None) -> None:
        """Takes nothing new from now on; what lives gets `seconds`, by default `drain_s`."""
        engine = self._engine
        if engine.drain.begin(engine.clock(), seconds):
            engine.workers.announce()

    @property
    def is_due(self) -> bool:
        """A drain has begun, and nothing lives any more, or its time is up."""
        engine = self._engine
        return engine.drain.begun and (engine.idle or engine.drain.remaining_s(engine.clock()) <= 0)

    def finish(self) -> None:
        """Ends what a drain left over, and tells the workers that this was the last message."""
        engine = self._engine
        ended_early = engine.book.num_live
        engine.finish_all(End(FinishReason.UNAVAILABLE, message="the service shut down"))
        engine.step()
        engine.workers.tell(engine_pb2.FromEngine(drained=engine_pb2.Drained(ended_early=ended_early)))
        engine.outbox.flush(engine.fronts)
