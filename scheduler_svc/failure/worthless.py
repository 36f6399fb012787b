"""Attributes a result with non-finite logits to the runner or to its sequences.

If the logits of some sequences are not finite, the fault is theirs, and they end with an error. If the logits of all
sampling sequences of several unrelated requests are not finite, the runner is faulty: its session ends, and the
sequences resume elsewhere. A request that was alone in its step is tried on another runner once, if there is one.
"""

from __future__ import annotations

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import GotResult
from scheduler_svc.scheduler.scheduler import Scheduler

NOT_FINITE = plan_pb2.ROW_STATUS_NOT_FINITE


def is_worthless(event: GotResult, scheduler: Scheduler, num_runners: int) -> bool:
    """Returns whether this result, which has rows that are not finite, is the fault of its runner.

    `num_runners`: number of runners that serve.
    """
    flight = scheduler.in_flight[0] if scheduler.in_flight else None
    if flight is None or flight.number != event.number or len(event.result.statuses) != len(flight.flags):
        return False
    statuses = np.frombuffer(event.result.statuses, np.uint8)
    if not (statuses[flight.sample] == NOT_FINITE).all():
        return False
    requests = {id(sequence.request): sequence.request for sequence in flight.sequences[flight.sample]}
    if len(requests) > 1:
        return True
    return num_runners > 1 and not any(request.suspicion.strikes for request in requests.values())
