"""The check of every model of this kind at start: a packed batch against each row alone through the model itself.

Four rows of unlike lengths are computed as a runner would: in chunks, decoding, with blocks that one row takes over
from another (a prefix hit), in steps that hold several rows. Their logits are compared with those of the model's own
forward pass and eager attention over one row at a time. They may differ by twice what the model's own SDPA attention
differs from its eager attention, and a little: that is rounding. So what nothing else recognises as unlike is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.model.errors import UnsupportedModel

FLOOR = 2e-4
"""Allowed in any case: root mean square of the differences of a position's logits, in their standard deviations."""
ROUNDING = 2.0
MOST = 0.25
"""Allowed at most, in the same unit: a model that rounding changes by more can't be compared."""
GENERATED = 3
"""Tokens that its own `generate` draws."""


@dataclass(frozen=True, slots=True)
class CheckShape:
    """The rows of the check and the steps that compute them."""

    block_size: int
    lengths: tuple[int, ...]
    shared: int
    """Positions, whole blocks, that the last row takes over from the one before it."""
    steps: tuple[tuple[tuple[int, int, int], ...], ...]
    """Extents of each step: row, first position, number of positions."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all rows."""
        return sum(-(-length // self.block_size) for length in self.lengths)

    def block_tables(self) -> list[list[int]]:
        """Returns the blocks of each row, of which the last one begins with some of the row before."""
        tables, free = [], 1
        for length in self.lengths:
            own = -(-length // self.block_size)
            tables.append(list(range(free, free + own)))
            free += own
        shared = self.shared // self.block_size
        tables[-1][:shared] = tables[-2][:shared]
        return tables


SMALL_BLOCKS = CheckShape(
    block_size=4,
    lengths=(11, 5, 14, 13),
    shared=8,
    steps=(
        ((0, 0, 4), (1, 0, 5), (2, 0, 6)),
        ((2, 6, 8),),
        ((3, 8, 1), (0, 4, 6)),
        ((0, 10, 1), (3, 9, 1)),
        ((3, 10, 3),),
    ),
)
KERNEL_BLOCKS = CheckShape(
    block_size=16,
    lengths=(37, 20, 50, 45),
    shared=32,
    steps=(
        ((0, 0, 16), (1, 0, 20), (2, 0, 24)),
        ((2, 24, 26),),
        ((3, 32, 1), (0, 16, 20)),
        ((0, 36, 1), (3, 33, 1)),
        ((3, 34, 11),),
    ),
)
"""With blocks that the GPU's attention has."""
TRIES = 2
"""Other tokens are tried before a model is refused: a router of experts may stand on an edge between two of them."""


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One step of the check; arrays as in `runner_svc.interface.step.StepBatch`."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    prompt_lens: NDArray[np.int64]
    """Of each position."""
    block_size: int

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """int64 [T]: where each position's keys and values are written."""
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        blocks = self.block_tables[rows, self.positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + self.positions % self.block_size


ComputeStep = Callable[[CheckStep], Tensor]
"""Computes the step over a cache of the shape's blocks; returns the logits [T, vocab_size] of all of its
positions."""


def check_model(model: Any, compute: ComputeStep, vocab_size: int, shape: CheckShape = SMALL_BLOCKS) -> None:
    """Raises UnsupportedModel, naming the place, if `compute` does not compute what `model` does.

    `model` is left with the attention implementation that it has.
    """
    difference: str | None = None
    for seed in range(TRIES):
        rows = _rows(shape, vocab_size, seed)
        eager = [_alone(model, row, "eager") for row in rows]
        bound = min(ROUNDING * _noise(model, rows[2], eager[2]) + FLOOR, MOST)
        difference = _generates_otherwise(model, rows[1], bound) or _difference(
            rows, eager, _packed(shape, rows, compute), bound
        )
        if difference is None:
            return
    raise UnsupportedModel(f"{type(model).__name__} is not served: {difference}.")


def _noise(model: Any, row: NDArray[np.int64], eager: Tensor) -> float:
    """Returns what rounding does: SDPA against eager attention; without SDPA, a batch of the row twice against it."""
    if getattr(model, "_supports_sdpa", False):
        other = _alone(model, row, "sdpa")
    else:
        other = _alone(model, np.stack((row, row)), "eager")
    return _apart(other, eager).max().item()


def _rows(shape: CheckShape, vocab_size: int, seed: int) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    rows = [random.integers(0, vocab_size, length) for length in shape.lengths]
    rows[-1][: shape.shared] = rows[-2][: shape.shared]
    return rows


def _packed(shape: CheckShape, rows: list[NDArray[np.int64]], compute: ComputeStep) -> list[dict[int, Tensor]]:
    """Returns the logits of each row by position; the last row has none of those that it took over."""
    tables = shape.block_tables()
    width = max(map(len, tables))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    found: list[dict[int, Tensor]] = [{} for _ in rows]
    for extents in shape.steps:
        ranges = [np.arange(start, start + count) for _, start, count in extents]
        logits = compute(
            CheckStep(
                tokens=np.concatenate([rows[row][span] for (row, _, _), span in zip(extents, ranges, strict=True)]),
                positions=np.concatenate(ranges),
                starts=np.array([start for _, start, _ in extents], np.int32),
                counts=np.array([count for _, _, count in extents], np.int32),
                block_tables=padded[[row for row, _, _ in extents]],
                prompt_lens=np.concatenate([np.full(count, len(rows[row]), np.int64) for row, _, count in extents]),
                block_size=shape.block_size,
            )
        ).float()
        places = [(row, int(position)) for (row, _, _), span in zip(extents, ranges, strict=True) for position in span]
        for place, (row, position) in enumerate(places):
            found[row][position] = logits[place].cpu()
    return found


def _difference(
    rows: list[NDArray[np.int64]], eager: list[Tensor], packed: list[dict[int, Tensor]], bound: float
) -> str | None:
    for row, (logits, own) in enumerate(zip(packed, eager, strict=True)):
        for position, values in sorted(logits.items()):
            apart = _apart(values, own[position]).item()
            if not apart <= bound:  # NaN too
                return (
                    f"over the paged cache, the logits of position {position} of row {row} ({len(rows[row])} tokens) "
                    f"differ by {apart:.2g} standard deviations from its own eager attention's, where {bound:.2g} is "
                    "rounding"
                )
    return None


def _generates_otherwise(model: Any, row: NDArray[np.int64], bound: float) -> str | None:
    """A class whose `generate`, over its own cache, computes something else than its forward pass over a whole text."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=GENERATED,
        min_new_tokens=GENERATED,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = torch.from_numpy(row).to(model.device)[None]
    try:
        with _implementation(model, "eager"), torch.inference_mode():
            output = model.generate(ids, generation_config=settings, attention_mask=torch.ones_like(ids))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return f"its own `generate` fails, so that it can't be compared ({type(error).__name__}: {reason})"
    text = output.sequences[0, :-1].cpu().numpy()
    whole = _alone(model, text, "eager")[len(row) - 1 :]
    cached = torch.cat(output.logits).float().cpu()
    if not _apart(cached, whole).max().item() <= bound:
        if not _apart(cached[:1], whole[:1]).max().item() <= bound:  # nothing is cached yet
            return "its forward pass numbers positions from another number than 0, which its `generate` begins with"
        return "its `generate`, over its own cache, gives other logits than its forward pass over the whole text"
    return None


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _alone(model: Any, row: NDArray[np.int64], implementation: str, **arguments: Any) -> Tensor:
    """Returns the logits [T, vocab_size] of one row through the model's own attention."""
    with _implementation(model, implementation), torch.inference_mode():
        ids = torch.from_numpy(np.atleast_2d(row)).to(model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False, **arguments).logits[0]
    return logits.float().cpu()


def _apart(values: Tensor, own: Tensor) -> Tensor:
    """Returns the root mean square of the differences along the last dimension, in standard deviations of `own`."""
    return (values - own).square().mean(-1).sqrt() / own.std(-1).clamp(min=1e-30)
