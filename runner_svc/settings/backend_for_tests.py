"""What tests and benchmarks set of the backends without a model: one setting, `test_backend`, which is a JSON object.

Each of its members was a setting of its own once. Those spellings are refused, wherever they stand: to ignore one would
be to run another test than the one that was asked for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

PREFIX = "ROSTER_"


class BackendForTests(BaseModel):
    """What the hash and the null backend do; the null backend draws no end and knows no poison."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(default=259, ge=259, description="Vocabulary, in tokens.")
    eos_probability: float = Field(
        default=1 / 64, ge=0, le=1, description="Chance that the hash backend ends a sequence, per token."
    )
    poison_token: int | None = Field(
        default=None, ge=0, description="Token id that ends a step of the hash backend that computes it."
    )
    poison: Literal["kill", "hang", "error", "broken"] = Field(
        default="kill", description="What it does: SIGKILL, an endless step, an error, an error that ends the process."
    )
    step_ms: float = Field(default=0.0, ge=0, description="Least time of a step, in milliseconds.")


OLD_NAMES = frozenset(BackendForTests.model_fields)
"""Settings that these were."""


def refusal(name: str, spelling: str) -> str:
    """What to write instead of an old spelling."""
    example = json.dumps({name: "..."})
    return (
        f"{spelling} is a part of test_backend: write --test-backend '{example}', or {PREFIX}TEST_BACKEND='{example}'"
    )


def old_flag(given: bool | Sequence[str] | None) -> str | None:
    """The refusal of the first old flag among those of a command line; True: this process's."""
    if not given:
        return None
    for argument in sys.argv[1:] if given is True else given:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in OLD_NAMES:
            return refusal(name, flag)
    return None


class OldVariables(PydanticBaseSettingsSource):
    """Environment variables of the old names: what they hold counts as given, and is refused with what a file gives."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Never asked: all values come at once."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Their values by name."""
        given = {variable.upper(): value for variable, value in os.environ.items()}
        return {name: value for name in OLD_NAMES if (value := given.get(f"{PREFIX}{name.upper()}")) is not None}
