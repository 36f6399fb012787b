"""Which runner's step times policies read where they ask for no particular one's."""

from __future__ import annotations

import numpy as np

from roster_common.link_protocol import PROTOCOL_VERSION
from roster_protos import plan_pb2
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.step_costs import costs_of


def hello(row_s: float) -> plan_pb2.Hello:
    return plan_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        num_slots=8,
        block_size=16,
        num_blocks=64,
        max_step_tokens=512,
        step_costs=costs_of(lambda decode, chunks: row_s + 1e-5 * sum(count for _, count in chunks)),
    )


def test_the_slowest_runner_is_chosen_when_one_joins_or_leaves_and_when_costs_change() -> None:
    ledger = Ledger()
    pool = RunnerPool(SchedulerSettings(), lambda: 0.0, ledger)
    fast, slow = (pool.add(session, hello(row_s)).step_times for session, row_s in ((1, 0.004), (2, 0.005)))
    assert ledger.step_times is slow and ledger.runners == 2
    assert pool.schedulers[1].load(WaitingQueue(), np.array([], np.int64)).queue_runners == 2
    starts, counts = np.full(8, 200, np.int32), np.ones(8, np.int32)
    for _ in range(16 * 64):
        fast.note(starts, counts, 8, 0.009, 0.009)
    assert fast.known and fast.row_s < slow.row_s, "used when a policy asks; the measured row does not change"
    assert ledger.step_times is fast, "another program shares its card"
    pool.remove(1)
    assert ledger.step_times is slow
    assert pool.schedulers[2].load(WaitingQueue(), np.array([], np.int64)).queue_runners == 1
    pool.remove(2)
    assert ledger.step_times is None
