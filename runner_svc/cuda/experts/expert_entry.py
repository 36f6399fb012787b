"""Launches kernels/expert_entry.cu: what lies between a layer's output product and the products of its experts."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.experts.expert_product import matrix_map
from runner_svc.cuda.experts.expert_routing import routing_defines
from runner_svc.cuda.experts.expert_variant import STEP, TilesVariant, num_tiles
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.interface.products.expert_launchers import ROUTED_AT_ONCE, ExpertPlan
from runner_svc.model.families.experts_config import ExpertsConfig

_THREADS = 256
_ROWS = 16
"""Of a cluster."""
_MOST_ROWS = 512
"""More make the router's product long enough for a kernel of its own."""
_SPLITS = (4, 8)
"""Blocks of a cluster, the faster number first: it leaves more multiprocessors to the products that follow."""
_FETCHED, _FETCH_STRIDE = 8, 2
"""Pieces of 64 columns of the first gate-up tiles, 32 KiB each, that L2 gets meanwhile, and which: every second one, as
kernels/expert_tiles.cu asks for."""
_MAX_BYTES = 200 * 1024
_MAX_MAPS = 1024


class ExpertEntry:
    """Addition, norm, router and routing of the layers of one model, where `products` multiply with its experts."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        dtype: torch.dtype,
        products: TilesVariant,
        *,
        split: int | None = None,
        overlap: bool = False,
    ) -> None:
        """`split` is the blocks of a cluster, by default `split_of` the model.

        Raises ValueError for sizes that the kernel lacks.
        """
        split = split or split_of(config, hidden_size)
        if split is None:
            raise ValueError(f"one kernel cannot route rows of {hidden_size} to {config.num_experts} experts")
        self._products = products
        self._split = split
        self._map = lru_cache(_MAX_MAPS)(matrix_map)
        self._kernel = Kernel(
            load("expert_entry", entry_defines(config, hidden_size, dtype, split)),
            "expert_entry",
            # map of gate-up weights; product, residual, norm weight, out, router, bias; experts, weights, indexes,
            # members, counts, ends, jobs, arrived; eps; rows, rows of a job, room; of gate-up: blocks, tiles, outputs,
            # pieces, and their distance
            "128sPPPPPPPPPPPPPPfiiiiiiii",
            _THREADS,
            shared_bytes=entry_bytes(config.num_experts, hidden_size, split),
            overlap=overlap,
        )

    def fits(self, rows: int) -> bool:
        """Returns whether it is for that number of rows."""
        return ROUTED_AT_ONCE < rows <= _MOST_ROWS

    def __call__(
        self,
        stream: int,
        product: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        router: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        gate_up: Tensor,
        eps: float,
    ) -> None:
        """`residual` [T, hidden_size] += `product`; `out` = rms_norm(residual) * norm_weight; `plan` is its routing.

        `router` is [num_experts, hidden_size]. `bias` is as of `ExpertRouting`. The plan's places and pairs are
        left to products that gather. L2 gets the first weights of `gate_up` [num_experts, 2 * inner, hidden_size].
        """
        num_experts, num_rows, width = gate_up.shape
        outputs, rows = num_rows // 2, len(residual)
        tiles = num_tiles(outputs, self._products.outputs(True))
        self._kernel(
            stream,
            -(-rows // _ROWS) * self._split,
            self._map(gate_up.data_ptr(), num_experts * num_rows, width, self._products.copied_rows(True)),
            product.data_ptr(),
            residual.data_ptr(),
            norm_weight.data_ptr(),
            out.data_ptr(),
            router.data_ptr(),
            address_of(bias),
            plan.experts.data_ptr(),
            plan.weights.data_ptr(),
            plan.indexes.data_ptr(),
            plan.members.data_ptr(),
            plan.counts.data_ptr(),
            plan.ends.data_ptr(),
            plan.jobs.data_ptr(),
            plan.arrived.data_ptr(),
            eps,
            rows,
            self._products.job_rows,
            plan.members.shape[1],
            min(num_multiprocessors(), num_experts * tiles),
            tiles,
            outputs,
            min(_FETCHED, width // STEP // _FETCH_STRIDE),
            _FETCH_STRIDE,
        )


def entry_defines(config: ExpertsConfig, hidden_size: int, dtype: torch.dtype, split: int) -> dict[str, int | str]:
    """The source's macros. Raises ValueError for sizes that the kernel lacks."""
    return routing_defines(config) | {"SCALAR": DTYPE_DEFINES[dtype], "WIDTH": hidden_size, "SPLIT": split}


def entry_bytes(num_experts: int, hidden_size: int, split: int) -> int:
    """Returns the shared memory of a block: its columns of rows and router; the logits, in part and whole; squares."""
    experts = -(-num_experts // 16) * 16
    return (_ROWS + experts) * 2 * (hidden_size // split) + 4 * (_ROWS + _ROWS // split) * (experts + 4) + 4 * _ROWS


def split_of(config: ExpertsConfig, hidden_size: int) -> int | None:
    """Returns the blocks of a cluster for a model; None if the kernel lacks its sizes."""
    if config.num_experts > _THREADS:
        return None
    for split in _SPLITS:
        if hidden_size % (16 * split) == 0 and entry_bytes(config.num_experts, hidden_size, split) <= _MAX_BYTES:
            return split
    return None
