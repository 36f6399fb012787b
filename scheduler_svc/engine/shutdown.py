"""The end of the service: nothing new is taken, what lives gets its time, the rest is ended and workers are told."""

from __future__ import annotations

from collections.abc import Callable

from roster_protos import engine_pb2
from scheduler_svc.engine.front_workers import FrontWorkers
from scheduler_svc.link.links import Fronts
from scheduler_svc.model.sequence import End, FinishReason
from scheduler_svc.requests.drain import Drain
from scheduler_svc.requests.requests import Requests


class Shutdown:
    """Carries out the `Drain` of one engine."""

    def __init__(
        self,
        requests: Requests,
        drain: Drain,
        workers: FrontWorkers,
        fronts: Fronts,
        step: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`step`: a turn of the engine."""
        self._requests = requests
        self._drain = drain
        self._workers = workers
        self._fronts = fronts
        self._step = step
        self._clock = clock

    def begin(self, seconds: float | None = None) -> None:
        """Takes nothing new from now on; what lives gets `seconds`, by default `drain_s`."""
        if self._drain.begin(self._clock(), seconds):
            self._workers.announce()

    @property
    def is_due(self) -> bool:
        """A drain has begun, and nothing lives any more, or its time is up."""
        return self._drain.begun and (self._requests.idle or self._drain.remaining_s(self._clock()) <= 0)

    def finish(self) -> None:
        """Ends what a drain left over, and tells the workers that this was the last message."""
        ended_early = self._requests.book.num_live
        self._requests.finish_all(End(FinishReason.UNAVAILABLE, message="the service shut down"))
        self._step()
        self._workers.broadcast(engine_pb2.FromEngine(drained=engine_pb2.Drained(ended_early=ended_early)))
        self._requests.outbox.flush(self._fronts)
