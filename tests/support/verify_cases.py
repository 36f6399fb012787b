"""Random verify batches over a paged cache: rows of a few positions that begin where a counter says.

`AttentionBatch` is their reference: its rows have the queries that are present.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from runner_svc.attention.cuda import CudaAttention
from runner_svc.interface.attention_launcher import VerifyRows
from tests.support.attention_cases import AttentionBatch, AttentionCase
from tests.support.attention_runs import TOLERANCE, attention_of, stream_of, to_device, wait_for

_PLAIN = AttentionCase((), ())


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """Rows whose first query sees `known` positions, with `drafted` more queries of `positions` - 1 possible ones.

    `below` and `above` are the distances of the host's bounds from the truth. `kind` has everything else.
    """

    known: tuple[int, ...]
    drafted: tuple[int, ...]
    positions: int
    below: int = 0
    above: int = 0
    kind: AttentionCase = _PLAIN

    @property
    def present(self) -> AttentionCase:
        """The present queries as rows of several positions."""
        lengths = tuple(known + drafted for known, drafted in zip(self.known, self.drafted, strict=True))
        return replace(self.kind, lengths=lengths, counts=tuple(1 + drafted for drafted in self.drafted))


class VerifyBatch:
    """A case with its tensors. Absent queries and keys and values at their positions are NaN."""

    def __init__(self, case: VerifyCase, seed: int, device: torch.device) -> None:
        self.case = case
        self.batch = AttentionBatch(case.present, seed, device)
        rows, size = len(case.known), case.positions
        places = [row * size + i for row, drafted in enumerate(case.drafted) for i in range(1 + drafted)]
        self.places = torch.tensor(places, device=device)
        self.queries = torch.full((rows * size, *self.batch.queries.shape[1:]), float("nan"), device=device)
        self.queries = self.queries.to(case.kind.dtype)
        self.queries[self.places] = self.batch.queries
        self.output = torch.full_like(self.queries, float("nan"))
        # The slot after the last row's is the padding's, as in the block tables.
        counters = np.array([*case.known, 10**6], np.int32)
        self.counters = torch.from_numpy(counters).to(device)
        # What a plan does not name must not matter.
        self.drafted = torch.tensor([*case.drafted, 10**6], dtype=torch.int32, device=device)

    @property
    def rows(self) -> VerifyRows:
        known = np.array(self.case.known, np.int32)
        indexes = np.arange(len(known), dtype=np.int32)
        lowers = np.maximum(known - self.case.below, 0)
        return VerifyRows(lowers, known + self.case.above, indexes, indexes * self.case.positions)

    def run(self, attention: CudaAttention, repeats: int = 1, room: int = 1) -> None:
        """Runs a plan that has room for `room` more rows."""
        count, positions = len(self.case.known) + room, self.case.positions
        plan = np.zeros(attention.verify_plan_words(count, positions), np.int32)
        attention.plan_verify(self.rows, plan, count, positions)
        device = self.queries.device
        device_plan = to_device(plan, device)
        for _ in range(repeats):
            self.output.fill_(float("nan"))
            attention.run_verify(
                stream_of(device),
                0,
                self.queries,
                self.output,
                device_plan.data_ptr(),
                count,
                positions,
                self.counters,
                self.drafted if positions > 1 else None,
            )
        wait_for(device)

    def attention(self, room: int = 1) -> CudaAttention:
        return attention_of(self.batch, room)

    def error(self) -> float:
        """Returns the largest relative error of a present query's head; infinite if one is not finite."""
        output, expected = self.output[self.places].float(), self.batch.expected()
        if not output.isfinite().all():
            return float("inf")
        norms = expected.norm(dim=-1).clamp(min=1e-3)
        return float(((output - expected).norm(dim=-1) / norms).max())

    def check(self, seed: int) -> None:
        error = self.error()
        assert error < 5 * TOLERANCE[self.case.kind.dtype], f"seed {seed}: error {error:.1e} in {self.case}"


def output_of(batch: VerifyBatch) -> Tensor:
    """Returns the outputs of the present queries."""
    return batch.output[batch.places]
