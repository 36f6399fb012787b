"""What a step costs: seconds as a function of what the step does, and the size of the runner it belongs to.

    seconds = fixed + token * charged tokens + sequence * sequences + context * context tokens + pair * prefill pairs
    charged tokens = 0 up to free_tokens, else (tokens rounded up to a multiple of tile_tokens) - free_tokens

*tokens* are the positions computed, *sequences* the rows, *context tokens* the positions whose KV the rows read (a row
of count c at start s reads s + c), *prefill pairs* the (query, key) pairs of rows of more than one position (the
quadratic term of long prompts). *free_tokens* ride along while reading the weights is what takes the time. A GPU
multiplies tiles of *tile_tokens* rows, and one that is not full takes as long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roster_common.wrong_values import wrong_values
from roster_protos import plan_pb2

SHIPPED = Path(__file__).parent / "costs"


class UnknownCostModel(ValueError):
    """No such cost model, or a file that is none; the message lists what is shipped."""


@dataclass(slots=True)
class StepWork:
    """What one step does: see the module."""

    tokens: int
    sequences: int
    context_tokens: int
    prefill_pairs: float

    @classmethod
    def of_plan(cls, plan: plan_pb2.Plan) -> StepWork:
        """The work of a plan's extents."""
        packed = plan.extent_starts
        sequences = len(packed) // 4
        if plan.extent_counts == _ones(sequences):
            return cls(sequences, sequences, _sum(packed) + sequences, 0.0)
        starts = np.frombuffer(packed, "<i4")
        counts = np.frombuffer(plan.extent_counts, "<i4").astype(np.int64)
        pairs = counts * starts + counts * (counts + 1) / 2
        return cls(
            int(counts.sum()),
            sequences,
            int((starts + counts).sum()),
            float(pairs[counts > 1].sum()),
        )


def _sum(packed: bytes) -> int:
    """Sum of a column; a short one is faster without numpy."""
    if len(packed) < 256:
        return sum(memoryview(packed).cast("i"))
    return int(np.add.reduce(np.frombuffer(packed, "<i4")))


_ONES = np.ones(4096, "<i4").tobytes()


def _ones(count: int) -> bytes:
    """A column of `count` ones."""
    return _ONES[: 4 * count] if count <= 4096 else np.ones(count, "<i4").tobytes()


class RunnerShape(BaseModel):
    """The runner that a cost model speaks of, as its hello would say it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: int = Field(ge=1, description="Sequences that run at once.")
    kv_tokens: int = Field(ge=1, description="Size of the KV cache, in tokens.")
    block_size: int = Field(default=16, ge=1, description="Tokens a KV block.")
    step_tokens: int = Field(ge=1, description="Most positions a step.")
    vocab_size: int = Field(default=32_000, ge=257, description="Token ids.")


class CostModel(BaseModel):
    """Coefficients in seconds; nonnegative. A file of `costs/` is one of these as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="What it is called.")
    source: str = Field(default="", description="What it was fitted to, and how.")
    fixed_s: float = Field(ge=0, description="Seconds a step.")
    token_s: float = Field(ge=0, description="Seconds a position computed, beyond the free ones.")
    free_tokens: int = Field(default=0, ge=0, description="Positions a step that take no time of their own.")
    tile_tokens: int = Field(
        default=1,
        ge=1,
        description="Steps of more than the free positions are charged for the next multiple of it, less those.",
    )
    sequence_s: float = Field(default=0.0, ge=0, description="Seconds a row.")
    context_s: float = Field(default=0.0, ge=0, description="Seconds a position whose KV is read.")
    pair_s: float = Field(default=0.0, ge=0, description="Seconds a (query, key) pair of prompt rows.")
    link_s: float = Field(
        default=0.0, ge=0, description="Seconds that a message takes between scheduler and runner, one way."
    )
    front_s: float = Field(
        default=0.0, ge=0, description="Seconds from the engine to the client, and from it to the engine."
    )
    runner: RunnerShape

    def step_seconds(self, work: StepWork) -> float:
        """How long the runner computes a step."""
        return self.timer()(work)

    def timer(self) -> Callable[[StepWork], float]:
        """`step_seconds` for those who call it often: attributes of a pydantic model are slow."""
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
    """Positions of a step that take time of their own."""
    return -(-tokens // tile_tokens) * tile_tokens - free_tokens if tokens > free_tokens else 0


def shipped_cost_models() -> list[str]:
    """Names of the cost models that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_cost_model(name: str) -> CostModel:
    """A shipped cost model by name, or one in a JSON file. Raises UnknownCostModel."""
    path = Path(name)
    if name in shipped_cost_models():
        path = SHIPPED / f"{name}.json"
    if not path.is_file():
        known = ", ".join(shipped_cost_models())
        raise UnknownCostModel(f"there is no cost model {name!r}: give a JSON file, or one of {known}")
    try:
        return CostModel.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        raise UnknownCostModel(f"{path} is no cost model: {wrong_values(error)}") from error
    except ValueError as error:
        raise UnknownCostModel(f"{path} is no cost model: {error}") from error
