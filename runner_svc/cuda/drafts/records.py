"""Launches kernels/expand_records.cu: a record of the sampler for each draw of a row."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.sampling.sample_records import RECORD_WORDS

_THREADS = 128


class ExpandRecords:
    """Makes the records of a step's draws."""

    def __init__(self) -> None:
        self._kernel = Kernel(load("expand_records", {}), "expand_records", "PPPPPii", _THREADS)

    def __call__(
        self, stream: int, records: Tensor, sampled: Tensor, rows: DraftRows, expanded: Tensor, stride: int
    ) -> None:
        """Fills the first L * `stride` records of `expanded`; both it and `records` [L] are words of SAMPLE_RECORD.

        `sampled`: int32 [L], the row of the step that each record belongs to. Draw j of a row is that after its j-th
        position. A record whose position is not negative has one draw, with that position. An absent draw has position
        0.
        """
        num_draws = len(sampled) * stride
        assert len(expanded) >= num_draws * RECORD_WORDS, "more draws than the plan may have"
        self._kernel(
            stream,
            -(-num_draws // _THREADS),
            records.data_ptr(),
            sampled.data_ptr(),
            rows.firsts.data_ptr(),
            rows.present.data_ptr(),
            expanded.data_ptr(),
            num_draws,
            stride,
        )
