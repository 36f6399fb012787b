"""Samples one token per row of logits and reports log-probabilities.

A row's token depends on its own logits, parameters and history, never on other rows. A greedy row takes the argmax of
its logits; any other row takes the argmax of `scaled + gumbel` (see `gumbel`), whose noise is keyed by (seed, sample
index, position). On the CPU such rows are computed one by one: torch's vectorised loops compute the tail of a tensor
with a different last bit, and the tail's place depends on the number of rows.

Order of the parameters: adjustments (`logit_adjustments`), the mask of a constrained row, temperature, top_k, top_p
over the ids that top_k kept, min_p. Each truncation keeps a prefix of the ids sorted by descending logit, equal logits
by ascending id. Log-probabilities are those of the adjusted and masked logits; excluded ids have -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roster_protos import plan_pb2
from runner_svc.arithmetic import functions
from runner_svc.interface.step import StepBatch, allowed_ids
from runner_svc.sampling.gumbel import gumbel, key_words
from runner_svc.sampling.logit_adjustments import adjust_logits
from runner_svc.sampling.noise import draw_keys

# Number of likeliest ids that top_p tries first; multiplied by eight until their mass reaches p.
_TOP_P_CANDIDATES = 1024


@dataclass(slots=True, eq=False)
class SampledRows:
    """Result of sampling L rows of logits."""

    tokens: NDArray[np.int32]  # [L]; undefined where not finite
    finite: NDArray[np.bool_]  # [L] the row's logits were all finite, and some token was allowed
    logprobs: list[plan_pb2.RowLogprobs]  # of finite rows that requested them; `row` is the batch's row


class Sampler:
    """Samples rows; its only state is a tensor of the vocabulary's ids on the device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, batch: StepBatch, rows: NDArray[np.intp], masks: NDArray[np.uint32] | None = None
    ) -> SampledRows:
        """Samples the token after the last position of each of the batch's `rows` [L].

        `logits`: float32 [L, vocab_size], overwritten. `masks` [L, ceil(vocab_size / 32)]: a bit per id, set if the id
        is allowed; None allows all.
        """
        return self.draw(self.adjust(logits, batch, rows), logits, batch, rows, masks)

    @torch.inference_mode()
    def adjust(self, logits: Tensor, batch: StepBatch, rows: NDArray[np.intp]) -> Tensor:
        """Applies the adjustments, which read the sequences' tokens; returns bool [L]: whether logits were finite.

        Rows that are sampled later, when their slots may belong to other sequences, are adjusted right after the
        forward pass.
        """
        params, positions = batch.params[rows], batch.ends[rows]
        finite = _all_finite(logits)
        for i in np.flatnonzero(params["adjusted"]).tolist():
            adjust_logits(logits[i], params[i], batch.states[rows[i]], int(positions[i]))
        return finite

    @torch.inference_mode()
    def draw(
        self,
        finite: Tensor,
        logits: Tensor,
        batch: StepBatch,
        rows: NDArray[np.intp],
        masks: NDArray[np.uint32] | None = None,
    ) -> SampledRows:
        """Samples rows whose logits `adjust` has adjusted."""
        if masks is not None:
            forbidden = torch.from_numpy(~allowed_ids(masks, logits.shape[1]))
            logits.masked_fill_(forbidden.to(logits.device), -torch.inf)
        best, tokens = logits.max(dim=1)
        finite = finite & torch.isfinite(best)
        finite_rows = finite.cpu().numpy()
        self._choose(logits, best, tokens, batch.params[rows], batch.ends[rows], finite_rows)
        sampled = tokens.to(torch.int32).cpu().numpy()
        logprobs = [
            _row_logprobs(logits[i : i + 1], sampled[i : i + 1], row, 0, top)
            for i, row in enumerate(rows.tolist())
            if finite_rows[i] and (top := batch.states[row].logprobs) is not None
        ]
        return SampledRows(sampled, finite_rows, logprobs)

    @torch.inference_mode()
    def tokens(self, logits: Tensor, params: NDArray[np.void], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the token at each of `positions` [L], drawn from `logits` [L, vocab_size]: int32 [L].

        `params` [L]: records of ROW_PARAMS. Tokens are arbitrary where logits are not finite.
        """
        best, tokens = logits.max(dim=1)
        self._choose(logits, best, tokens, params, positions, torch.isfinite(best).cpu().numpy())
        return tokens.to(torch.int32).cpu().numpy()

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, batch: StepBatch, row: int) -> plan_pb2.RowLogprobs:
        """Scores the prompt tokens after the first `n = batch.num_scored(row)` positions of the row, unadjusted.

        `logits`: float32 [n, vocab_size] of these positions.
        """
        state, first = batch.states[row], int(batch.starts[row]) + 1
        targets = state.tokens[first : first + len(logits)]
        return _row_logprobs(logits, targets, row, first, state.prompt_logprobs or 0)

    def _choose(
        self,
        logits: Tensor,
        best: Tensor,
        tokens: Tensor,
        params: NDArray[np.void],
        positions: NDArray[np.int32],
        finite: NDArray[np.bool_],
    ) -> None:
        """Overwrites the greedy `tokens` of rows with a temperature."""
        noisy = finite & (params["temperature"] > 0)
        if not noisy.any():
            return
        words = key_words(draw_keys(params["seed"], params["sample_index"], positions), logits.device)
        truncated = noisy & ((params["top_k"] > 0) | (params["top_p"] < 1))
        for i in np.flatnonzero(truncated).tolist():
            scaled = (logits[i] - best[i]) / float(params["temperature"][i])
            ids = _kept_ids(scaled, params[i])
            scores = scaled[ids] + gumbel(words[i : i + 1], ids.to(torch.int32))[0]
            tokens[i] = ids[scores.argmax()]
        whole = np.flatnonzero(noisy & ~truncated)
        for chunk in whole.reshape(-1, 1) if _row_by_row(logits.device) else [whole]:
            index = torch.from_numpy(chunk).to(logits.device)
            temperatures = torch.from_numpy(params["temperature"][chunk, None]).to(logits.device)
            scaled = (logits[index] - best[index, None]) / temperatures
            scores = gumbel(words[index], self._ids) + scaled
            with np.errstate(divide="ignore"):
                least = torch.from_numpy(np.log(params["min_p"][chunk, None])).to(logits.device)
            tokens[index] = scores.masked_fill_(scaled < least, -torch.inf).argmax(dim=1)


def _row_by_row(device: torch.device) -> bool:
    return device.type == "cpu"


def _all_finite(logits: Tensor) -> Tensor:
    """bool [L]; one pass without a temporary, because min and max propagate NaN and infinities."""
    low, high = torch.aminmax(logits, dim=1)
    return torch.isfinite(low) & torch.isfinite(high)


def _likeliest(values: Tensor, count: int) -> Tensor:
    """Returns the ids of the `count` largest `values` [V], as int64 [count], in descending order of value.

    Equal values are in ascending order of id.
    """
    if count >= len(values):
        return values.sort(descending=True, stable=True).indices
    least = values.topk(count).values[-1]
    ids = torch.nonzero(values >= least).squeeze(1)
    return ids[values[ids].sort(descending=True, stable=True).indices[:count]]


def _kept_ids(scaled: Tensor, params: np.void) -> Tensor:
    """Returns one row's ids that top_k, top_p and min_p keep: int64, likeliest first, at least one.

    `scaled`: float32 [V], logits divided by the temperature and shifted so that the largest is 0.
    """
    limit = min(int(params["top_k"]) or len(scaled), len(scaled))
    top_p = float(params["top_p"])
    if top_p < 1:
        ids = _reaching(scaled, limit, top_p)
    else:
        ids = _likeliest(scaled, limit)
    if params["min_p"] > 0:
        ids = ids[scaled[ids] >= math.log(float(params["min_p"]))]
    return ids


def _reaching(scaled: Tensor, limit: int, top_p: float) -> Tensor:
    """Returns the fewest likeliest ids whose mass reaches `top_p` of the mass of the `limit` likeliest."""
    count = min(limit, _TOP_P_CANDIDATES)
    whole = functions.row_sum(scaled.exp().double()) if limit == len(scaled) else None
    while True:
        ids = _likeliest(scaled, limit if whole is None else count)
        weights = scaled[ids].exp().to(torch.float64)
        before = weights.cumsum(0) - weights
        total = functions.row_sum(weights) if whole is None else whole
        kept = max(1, int((before < top_p * total).sum()))
        if kept < len(ids) or len(ids) == limit:
            return ids[:kept]
        count = min(limit, count * 8)


def _row_logprobs(
    logits: Tensor, tokens: NDArray[np.int32], row: int, first_position: int, top: int
) -> plan_pb2.RowLogprobs:
    """Returns the log-softmax of `logits` [n, V] at `tokens` [n], and the `top` largest of each position."""
    values, top_ids, top_values = [], [], []
    for line, token in zip(logits, tokens.tolist(), strict=True):
        logprobs = functions.log_softmax(line)
        ids = _likeliest(logprobs, top) if top else torch.empty(0, dtype=torch.int64, device=logits.device)
        values.append(logprobs[token])
        top_ids.append(ids)
        top_values.append(logprobs[ids])
    return plan_pb2.RowLogprobs(
        row=row,
        first_position=first_position,
        values=torch.stack(values).cpu().numpy().tobytes(),
        top=top,
        top_ids=torch.cat(top_ids).to(torch.int32).cpu().numpy().tobytes(),
        top_values=torch.cat(top_values).cpu().numpy().tobytes(),
    )
