"""Buffers log-probabilities until the text of their tokens is decided: packed rows in, public messages out."""

from __future__ import annotations

from roster_protos import inference_pb2, plan_pb2
from scheduler_svc.front.base.little_endian import float32_list, int32_list


class LogprobColumns:
    """Log-probabilities of consecutive tokens of one sequence, with `top` alternatives for each."""

    __slots__ = ("_ids", "_sampled", "_values", "leave_out", "top")

    def __init__(self, top: int) -> None:
        """`top`: alternatives per token, 0 to 20."""
        self.top = top
        self.leave_out = 0
        """Number of coming tokens to discard."""
        self._sampled: list[float] = []
        self._ids: list[int] = []
        self._values: list[float] = []

    def __len__(self) -> int:
        return len(self._sampled)

    def extend(self, row: plan_pb2.RowLogprobs, skip: int = 0) -> None:
        """Adds the tokens of `row`, except the first `skip`."""
        values = float32_list(row.values)
        if self.leave_out:
            skip = min(self.leave_out, len(values))
            self.leave_out -= skip
        self._sampled += values[skip:]
        self._ids += int32_list(row.top_ids)[skip * self.top :]
        self._values += float32_list(row.top_values)[skip * self.top :]

    def take_rows(self, count: int) -> inference_pb2.Logprobs:
        """Removes and returns the first `count` tokens."""
        alternatives = count * self.top
        taken = inference_pb2.Logprobs(
            sampled=self._sampled[:count],
            top=self.top,
            top_token_ids=self._ids[:alternatives],
            top_logprobs=self._values[:alternatives],
        )
        del self._sampled[:count], self._ids[:alternatives], self._values[:alternatives]
        return taken
