"""Shutdown: stops admission, gives live requests their time, ends the rest and informs the workers."""

from __future__ import annotations

from collections.abc import Callable

from roster_protos import engine_pb2
from scheduler_svc.engine.front_workers import FrontWorkers
from scheduler_svc.link.links import Fronts
from scheduler_svc.model.sequence import End, FinishReason
from scheduler_svc.requests.drain import Drain
from scheduler_svc.requests.requests import Requests


class Shutdown:
    """Executes the `Drain` of one engine."""

    def __init__(
        self,
        requests: Requests,
        drain: Drain,
        workers: FrontWorkers,
        fronts: Fronts,
        step: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`step` runs one turn of the engine."""
        self._requests = requests
        self._drain = drain
        self._workers = workers
        self._fronts = fronts
        self._step = step
        self._clock = clock

    def begin(self, seconds: float | None = None) -> None:
        """Stops admission; live requests get `seconds`, by default `drain_s`."""
        if self._drain.begin(self._clock(), seconds):
            self._workers.announce()

    @property
    def is_due(self) -> bool:
        """Whether a drain has begun and no request is live any more, or its time is up."""
        return self._drain.begun and (self._requests.idle or self._drain.remaining_s(self._clock()) <= 0)

    def finish(self) -> None:
        """Ends the requests that outlived the drain and sends the workers their last message."""
        ended_early = self._requests.book.num_live
        self._requests.finish_all(End(FinishReason.UNAVAILABLE, message="the service shut down"))
        self._step()
        self._workers.broadcast(engine_pb2.FromEngine(drained=engine_pb2.Drained(ended_early=ended_early)))
        self._requests.outbox.flush(self._fronts)
