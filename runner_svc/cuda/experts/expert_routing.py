"""Routes rows to experts and sorts them; see `kernels/expert_routing.cu`."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.interface.products.expert_launchers import ROUTED_AT_ONCE, ExpertPlan, RowNorm
from runner_svc.model.families.experts_config import ExpertsConfig, Scoring

_THREADS = 1024
_MAX_TOP_K = 32
_MAX_GROUPS = 32


def routing_defines(config: ExpertsConfig) -> dict[str, int | str]:
    """The source's macros. Raises ValueError for sizes that the kernel lacks."""
    if config.num_experts > _THREADS or config.top_k > _MAX_TOP_K:
        raise ValueError(
            f"a GPU routes to up to {_MAX_TOP_K} of {_THREADS} experts, not {config.top_k} of {config.num_experts}"
        )
    router = config.router
    if router.groups > _MAX_GROUPS:
        raise ValueError(f"a GPU routes to experts in up to {_MAX_GROUPS} groups, not {router.groups}")
    return {
        "EXPERTS": config.num_experts,
        "TOP_K": config.top_k,
        "SCORING": list(Scoring).index(router.scoring),
        "NORMALIZE": int(router.normalize),
        "LEAST_SUM": f"{router.least_sum!r}f",
        "SCALE": f"{router.scale!r}f",
        "CORRECTED": int(router.is_corrected),
        "GROUPS": router.groups,
        "TOP_GROUPS": router.top_groups,
    }


class ExpertRouting:
    """The routing of one model."""

    def __init__(self, config: ExpertsConfig, *, overlap: bool = False) -> None:
        """Raises ValueError for sizes that the kernel lacks."""
        module = load("expert_routing", routing_defines(config))
        # logits, bias; experts, weights, places or indexes, pairs, members, counts, ends, jobs, arrived; squares,
        # scales, number, 1 / width, eps; columns, rows, rows of a job, room
        self._kernel = Kernel(module, "expert_routing", "PPPPPPPPPPPPPiffiiii", _THREADS, overlap=overlap)

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        job_rows: int,
        norm: RowNorm | None = None,
    ) -> None:
        """Fills `plan`, with jobs of up to `job_rows` pairs, from float32 `logits` [T, num_experts].

        With more than `ROUTED_AT_ONCE` rows, places and pairs are left to `ExpertRows.gather`, or places to products
        that gather.

        Rows of the logits may be far apart. `bias`, float32 [num_experts], is added to them, or it is the router's
        corrections where the configuration has some.
        With `norm`, of up to 128 rows, the plan gets the rows' scales.
        """
        rows = len(logits)
        self._kernel(
            stream,
            -(-rows // ROUTED_AT_ONCE),
            logits.data_ptr(),
            address_of(bias),
            plan.experts.data_ptr(),
            plan.weights.data_ptr(),
            (plan.places if rows <= ROUTED_AT_ONCE else plan.indexes).data_ptr(),
            plan.pairs.data_ptr(),
            plan.members.data_ptr(),
            plan.counts.data_ptr(),
            plan.ends.data_ptr(),
            plan.jobs.data_ptr(),
            plan.arrived.data_ptr(),
            norm.squares.data_ptr() if norm is not None else 0,
            plan.scales.data_ptr(),
            len(norm.squares) if norm is not None else 0,
            1.0 / norm.width if norm is not None else 0.0,
            norm.eps if norm is not None else 0.0,
            logits.stride(0),
            rows,
            job_rows,
            plan.members.shape[1],
        )
