"""The setting `test_backend` of tests and benchmarks: a JSON object that configures the backends without a model.

Each of its members was once a separate setting. The old names are refused in flags, environment and file, because
ignoring one would silently run a different test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

PREFIX = "ROSTER_"


class BackendForTests(BaseModel):
    """Configuration of the hash and null backends; the null backend samples no EOS and ignores `poison_token`.

    Copies to and from the host pool have troubles on the CPU too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(default=259, ge=259, description="Size of the vocabulary, in tokens.")
    eos_probability: float = Field(
        default=1 / 64, ge=0, le=1, description="Probability per token that the hash backend ends a sequence."
    )
    poison_token: int | None = Field(
        default=None, ge=0, description="Token id at which a step of the hash backend fails."
    )
    poison: Literal["kill", "hang", "error", "broken"] = Field(
        default="kill", description="How the step fails: SIGKILL, no end, an error, or an error that ends the process."
    )
    step_ms: float = Field(default=0.0, ge=0, description="Least time of a step, in milliseconds.")
    move_chunk_ms: float = Field(
        default=0.0, ge=0, description="Least time to read or write a chunk of blocks that move, in milliseconds."
    )
    draft_wrong: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Probability that a draft of the hash backend's own drafter is wrong; without it, nothing drafts.",
    )
    copy_delay_ms: float = Field(
        default=0.0,
        ge=0,
        description="Longest pause of a copy to or from the host pool, before and in a ticket, in milliseconds.",
    )
    copy_lost: float = Field(
        default=0.0, ge=0, le=1, description="Probability that no result names a ticket of such copies."
    )
    copy_seed: int = Field(default=0, description="Seed of both draws.")


OLD_NAMES = frozenset(BackendForTests.model_fields) - {
    "draft_wrong",
    "move_chunk_ms",
    "copy_delay_ms",
    "copy_lost",
    "copy_seed",
}
"""Names of the former settings."""


def refusal(name: str, spelling: str) -> str:
    """Returns the message that says what to write instead of an old spelling."""
    example = json.dumps({name: "..."})
    return (
        f"{spelling} is now part of test_backend: write --test-backend '{example}' or {PREFIX}TEST_BACKEND='{example}'"
    )


def old_flag(arguments: Sequence[str]) -> str | None:
    """Returns the message for the first old flag in a command line, or None."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in OLD_NAMES:
            return refusal(name, flag)
    return None


class OldVariables(PydanticBaseSettingsSource):
    """Reads environment variables of the old names, so that validation refuses them as it does those of a file."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Unused: `__call__` returns all values."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Returns the values by name."""
        given = {variable.upper(): value for variable, value in os.environ.items()}
        return {name: value for name in OLD_NAMES if (value := given.get(f"{PREFIX}{name.upper()}")) is not None}
