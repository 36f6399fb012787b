"""The plan of a verify step's attention: rows of a few positions that begin where only the device knows.

While a plan is made, earlier ones are in flight, and the host knows the number of tokens that they will add only within
bounds. The kernel reads the true number from a counter (kernels/decode_sight.cuh). The plan splits the work: its tiles
cover every position that a query can see if the counter is within its bounds, and a tile without a visible position
costs little. Otherwise it is a plan of decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.attention.decode_plan import DecodePlanner
from runner_svc.interface.attention_launcher import DecodeRows, VerifyRows


@dataclass(frozen=True, slots=True)
class VerifyPlanner:
    """Makes plans of rows of up to `positions` positions; `line` splits their tiles."""

    line: DecodePlanner
    positions: int
    # Positions for which a row of the block tables has room.
    capacity: int

    def write(self, rows: VerifyRows, plan: NDArray[np.int32]) -> None:
        """Fills `plan` [line.words] for N <= batch rows. Raises ValueError for bounds in the wrong order."""
        covered = self.covered(rows)
        self.line.write(covered.lengths, covered.table_rows, covered.query_rows, plan, firsts=covered.firsts)

    def covered(self, rows: VerifyRows) -> DecodeRows:
        """Returns the rows with the first positions and the lengths that the plan must cover.

        Raises ValueError if a row's lower bound exceeds its upper bound.
        """
        if (rows.lowers > rows.uppers).any():
            raise ValueError("the lower bound of a verify row's counter exceeds the upper bound")
        window = self.line.window
        return DecodeRows(
            np.minimum(rows.uppers + (self.positions - 1), self.capacity),
            rows.table_rows,
            rows.query_rows,
            None if window is None else np.maximum(rows.lowers - window, 0),
        )
