"""What a policy sees of the rows that may draft in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler_svc.policy.views import Load, RequestView

Drafts: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""A number of drafts for each row."""


class DraftRows(Protocol):
    """The decoding rows of a step. A row drafts 0 to `most` tokens; the model then verifies them in the step."""

    @property
    def acceptance(self) -> npt.NDArray[np.float64]:
        """Returns the probability of each row that a draft is accepted if those before it were; read-only.

        It is an average over the row's own drafts that fades with the text; a fresh row has the runner's average.
        """

    @property
    def most(self) -> npt.NDArray[np.int32]:
        """Returns the maximum number of drafts of each row; read-only. It is 0 if the request turns drafts off, has a
        constraint, or has all its tokens but one."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def request(self, row: int) -> RequestView:
        """Returns the row's request."""

    def seconds(self, drafts: Drafts) -> float:
        """Returns the predicted time of the step with these numbers of drafts, in seconds; 0 if nothing is known."""

    def best(self, load: Load) -> npt.NDArray[np.int32]:
        """Returns the numbers with which the step has the most tokens a second, all 0 if any other loses.

        They keep the ITL targets of `load` where the step keeps them without drafts. A row without hope has 0, except
        1 in at most one step of 50, to see whether that has changed. So that times can be compared, all have 0 in the
        first steps of a new number of rows, and in one step of 128.
        """


def are_drafts(answer: Any, rows: int) -> bool:
    """Returns whether a policy's answer has a whole number >= 0 for each row. Runs no code of the answer's own."""
    if type(answer) in (list, tuple):
        if not all(isinstance(number, int | np.integer) for number in answer):
            return False
        answer = np.asarray(answer)
    return (
        type(answer) is np.ndarray
        and answer.shape == (rows,)
        and (answer.dtype.kind in "iu" or not rows)
        and not (answer < 0).any()
    )
