"""A plan's copies between the cache and the host pool, and what it purges there, read from its packed columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import TAG_BYTES
from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault, int32_column, require, require_equal
from runner_svc.tiers.kv_copier import Tickets


def has_copies(plan: plan_pb2.Plan) -> bool:
    """Returns whether any column of offloads or loads, or of what is purged, is filled."""
    return bool(
        plan.offload_counts
        or plan.load_counts
        or plan.offload_sources
        or plan.load_sources
        or plan.offload_targets
        or plan.load_targets
        or plan.offload_tags
        or plan.purged_host_blocks
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlanCopies:
    """Tickets of both directions, and the host blocks that hold nothing any more."""

    offloads: Tickets
    tags: NDArray[np.uint8]  # [offloaded blocks, TAG_BYTES]
    loads: Tickets
    purged: NDArray[np.int32]

    @classmethod
    def read(cls, plan: plan_pb2.Plan) -> PlanCopies | None:
        """Returns views into the plan's bytes; None for a plan without copies. Raises PlanFault if lengths disagree."""
        if not has_copies(plan):
            return None
        offloads = _tickets("offload", plan.offload_sources, plan.offload_targets, plan.offload_counts)
        loads = _tickets("load", plan.load_sources, plan.load_targets, plan.load_counts)
        expected = TAG_BYTES * len(offloads.sources)
        if len(plan.offload_tags) != expected:
            raise PlanFault(f"offload_tags has {len(plan.offload_tags)} bytes, must be {expected}")
        tags = np.frombuffer(plan.offload_tags, np.uint8).reshape(-1, TAG_BYTES)
        return cls(offloads, tags, loads, int32_column("purged_host_blocks", plan.purged_host_blocks))


def _tickets(name: str, sources: bytes, targets: bytes, counts: bytes) -> Tickets:
    tickets = Tickets(
        int32_column(f"{name}_sources", sources),
        int32_column(f"{name}_targets", targets),
        int32_column(f"{name}_counts", counts),
    )
    require_equal(name, tickets.sources, tickets.targets)
    require(f"{name} ticket", tickets.counts < 1, "{} blocks, must be at least 1", tickets.counts)
    total = int(tickets.counts.sum(dtype=np.int64))
    if total != len(tickets.sources):
        raise PlanFault(f"the {name} tickets have {total} blocks, the columns {len(tickets.sources)}")
    return tickets
