"""Cost model of a runner: the seconds that a step takes as a function of its work, and the runner's sizes.

    seconds = fixed + token * charged tokens + sequence * sequences + context * context tokens + pair * prefill pairs
    charged tokens = 0 up to free_tokens, otherwise (tokens rounded up to a multiple of tile_tokens) - free_tokens

*tokens* are the positions computed, *sequences* the rows, and *context tokens* the positions whose KV the rows read (a
row of count c at start s reads s + c). *prefill pairs* are the (query, key) pairs of rows of more than one position,
the quadratic term of long prompts. *free_tokens* take no extra time, because reading the weights limits the step.
A GPU multiplies tiles of *tile_tokens* rows, and a partly filled tile takes as long as a full one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roster_common.wrong_values import wrong_values
from roster_protos import plan_pb2

Column = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.integer[Any]]
SHIPPED = Path(__file__).parent / "costs"


class UnknownCostModel(ValueError):
    """No such cost model, or an invalid file; the message lists the shipped models or says what is invalid."""


@dataclass(slots=True)
class StepWork:
    """Work of one step; the module's docstring defines the terms."""

    tokens: int
    sequences: int
    context_tokens: int
    prefill_pairs: float

    @classmethod
    def of_plan(cls, plan: plan_pb2.Plan) -> StepWork:
        """Returns the work of a plan's extents. Rows whose start only the runner knows read no context here."""
        packed = plan.extent_starts
        sequences = len(packed) // 4
        if plan.extent_counts == _ones(sequences):
            return cls(sequences, sequences, _sum(packed) + sequences, 0.0)
        starts, counts = np.frombuffer(packed, "<i4"), np.frombuffer(plan.extent_counts, "<i4").astype(np.int64)
        if plan.extent_drafts:
            return cls.of_run(np.maximum(starts, 0), counts, np.frombuffer(plan.extent_drafts, np.uint8))
        return cls._of_rows(starts, counts, counts > 1)

    @classmethod
    def of_run(cls, starts: Numbers, counts: Column, drafted: Numbers) -> StepWork:
        """Returns the work of rows of these columns [R], none with an unknown start.

        A row that verifies `drafted` tokens reads its KV once, so it has no prefill pairs.
        """
        return cls._of_rows(starts, counts, (counts > 1) & (drafted == 0))

    @classmethod
    def _of_rows(cls, starts: Numbers, counts: Column, prompts: npt.NDArray[np.bool_]) -> StepWork:
        pairs = counts * starts + counts * (counts + 1) / 2
        return cls(int(counts.sum()), len(starts), int((starts + counts).sum()), float(pairs[prompts].sum()))


def _sum(packed: bytes) -> int:
    """Returns the sum of an int32 column; for a short one, Python is faster than numpy."""
    if len(packed) < 256:
        return sum(memoryview(packed).cast("i"))
    return int(np.add.reduce(np.frombuffer(packed, "<i4")))


_ONES = np.ones(4096, "<i4").tobytes()


def _ones(count: int) -> bytes:
    """Returns an int32 column of `count` ones."""
    return _ONES[: 4 * count] if count <= 4096 else np.ones(count, "<i4").tobytes()


class RunnerShape(BaseModel):
    """Sizes of the runner that a cost model describes, as in its Hello."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: int = Field(ge=1, description="Sequences that can run at once.")
    kv_tokens: int = Field(ge=1, description="Size of the KV cache, in tokens.")
    block_size: int = Field(default=16, ge=1, description="Tokens per KV block.")
    step_tokens: int = Field(ge=1, description="Maximum number of positions per step.")
    vocab_size: int = Field(default=32_000, ge=257, description="Number of token ids.")
    host_kv_tokens: int = Field(default=0, ge=0, description="Size of the host pool, in tokens; 0: none.")
    load_block_ns: int = Field(
        default=48_000,
        ge=0,
        description="Time to load a block from the host pool, in nanoseconds: 2 MiB at 44 GB/s, as of 8B on an H200.",
    )
    offload_block_ns: int = Field(
        default=48_000, ge=0, description="Time to offload a block into the host pool, in nanoseconds."
    )


class CostModel(BaseModel):
    """Nonnegative coefficients in seconds. A file in `costs/` contains one cost model as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="Name of the model.")
    source: str = Field(default="", description="Data to which it was fitted, and how.")
    fixed_s: float = Field(ge=0, description="Seconds per step.")
    token_s: float = Field(ge=0, description="Seconds per computed position beyond the free ones.")
    free_tokens: int = Field(default=0, ge=0, description="Positions per step that take no extra time.")
    tile_tokens: int = Field(
        default=1,
        ge=1,
        description="Positions per tile; steps of more than the free positions are charged for whole tiles.",
    )
    sequence_s: float = Field(default=0.0, ge=0, description="Seconds per row.")
    context_s: float = Field(default=0.0, ge=0, description="Seconds per position whose KV is read.")
    pair_s: float = Field(default=0.0, ge=0, description="Seconds per (query, key) pair of prompt rows.")
    link_s: float = Field(default=0.0, ge=0, description="Seconds of a message between scheduler and runner, one way.")
    front_s: float = Field(default=0.0, ge=0, description="Seconds of a message between engine and client, one way.")
    runner: RunnerShape

    def step_seconds(self, work: StepWork) -> float:
        """Returns the seconds for which the runner computes a step."""
        return self.timer()(work)

    def timer(self) -> Callable[[StepWork], float]:
        """Returns `step_seconds` as a function for frequent calls, because attributes of a pydantic model are slow."""
        fixed_s, token_s, free_tokens, tile_tokens = self.fixed_s, self.token_s, self.free_tokens, self.tile_tokens
        sequence_s, context_s, pair_s = self.sequence_s, self.context_s, self.pair_s

        def seconds(work: StepWork) -> float:
            return (
                fixed_s
                + token_s * charged_tokens(work.tokens, free_tokens, tile_tokens)
                + sequence_s * work.sequences
                + context_s * work.context_tokens
                + pair_s * work.prefill_pairs
            )

        return seconds


def charged_tokens(tokens: int, free_tokens: int, tile_tokens: int) -> int:
    """Returns the positions of a step that take extra time."""
    return -(-tokens // tile_tokens) * tile_tokens - free_tokens if tokens > free_tokens else 0


def shipped_cost_models() -> list[str]:
    """Returns the names of the cost models in the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_cost_model(name: str) -> CostModel:
    """Returns a shipped cost model by name, or one from a JSON file. Raises UnknownCostModel."""
    path = Path(name)
    if name in shipped_cost_models():
        path = SHIPPED / f"{name}.json"
    if not path.is_file():
        known = ", ".join(shipped_cost_models())
        raise UnknownCostModel(f"there is no cost model {name!r}: give a JSON file, or one of {known}")
    try:
        return CostModel.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        raise UnknownCostModel(f"{path} is not a cost model: {wrong_values(error)}") from error
    except ValueError as error:
        raise UnknownCostModel(f"{path} is not a cost model: {error}") from error
