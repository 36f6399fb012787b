"""The rule by which drafted tokens are accepted; every backend follows it.

The token of each position is drawn as always, with that position's own noise. A draft is kept only if it equals the
draw, so the text is the one that would have come without drafts (Daliri, Musco, Suresh 2024: drafter-invariant
speculative decoding). Logits behind the first unequal draw follow a wrong token: they decide nothing, finite or not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2


def accept(
    draws: NDArray[np.int32], finite: NDArray[np.bool_], drafts: NDArray[np.int32]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the number of draws that each row keeps, uint8 [R], and the rows' plan_pb2.RowStatus, uint8 [R].

    `draws` [R, 1 + k]: the token drawn at each position; arbitrary where not `finite` [R, 1 + k] and behind a row's
    last position. `drafts` [R, k]: the drafted tokens, -1 behind a row's last one. A row keeps its draws up to and
    including the first that differs from its draft, or that has no draft. A position on this path whose logits are not
    finite ends the row before it; if that is the first one, the row keeps nothing and its status is
    ROW_STATUS_NOT_FINITE.
    """
    rows, width = drafts.shape
    equal = np.zeros((rows, width + 1), np.bool_)
    np.equal(draws[:, :width], drafts, out=equal[:, :width])
    equal[:, :width] &= drafts >= 0
    goes_on = equal & finite
    accepted = goes_on.argmin(axis=1)  # the last column is never equal
    counts = accepted + finite[np.arange(rows), accepted]
    statuses = np.where(counts > 0, plan_pb2.ROW_STATUS_UNSPECIFIED, plan_pb2.ROW_STATUS_NOT_FINITE)
    return counts.astype(np.uint8), statuses.astype(np.uint8)
