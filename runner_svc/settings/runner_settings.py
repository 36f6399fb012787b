"""Settings of the runner service: flags, then `ROSTER_*` environment, then the file named by `ROSTER_SETTINGS`.

Every field states its unit; `roster-runner --help` prints them, but for what only tests and benchmarks need. Both
services may share one file or environment: each ignores what it does not know.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, CliSuppress, PydanticBaseSettingsSource, SettingsConfigDict

from roster_common.setting_levels import EVERYONE, OPERATORS, tuning
from roster_common.setting_sources import ServiceSettings, UnusableSettings
from runner_svc.settings.backend_for_tests import OLD_NAMES, PREFIX, BackendForTests, OldVariables, old_flag, refusal


def default_cache_folder() -> Path:
    """Returns $XDG_CACHE_HOME/roster, by default ~/.cache/roster: it holds converted models.

    A user without a home folder gets one below /nonexistent, as in a passwd entry: what needs a cache then says so.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "roster"
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no passwd entry of this uid
        home = Path("/nonexistent")
    return home / ".cache" / "roster"


class RunnerSettings(ServiceSettings):
    """What an operator may set on `roster-runner`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="ignore",
        cli_kebab_case=True,
        cli_prog_name="roster-runner",
        cli_parse_none_str="none",  # by default "null", which is a device here
    )

    link: str = Field(
        "tcp://127.0.0.1:50063", description="ZeroMQ endpoint of the scheduler.", json_schema_extra=OPERATORS
    )
    runner_key: Path | None = Field(
        None,
        description="File with this runner's secret CURVE key (`roster keygen`); encrypts the link.",
        json_schema_extra=OPERATORS,
    )
    scheduler_key: Path | None = Field(
        None,
        description="File with the scheduler's public CURVE key; needed with a runner key.",
        json_schema_extra=OPERATORS,
    )
    runner_id: str | None = Field(
        None,
        min_length=1,
        description="Name of this runner, unique among the scheduler's and stable over restarts; default: the host's, "
        "and for others of this host with -2, -3, ..., by a lock file in the cache folder.",
        json_schema_extra=OPERATORS,
    )
    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model to serve: a folder, a .gguf file, a hub id, or 'smollm2', which needs no hub.",
        json_schema_extra=EVERYONE,
    )
    device: Literal["auto", "cpu", "cuda", "hash", "null"] = Field(
        "auto",
        description="What computes; auto: a GPU that can be used, else the CPU, and the log says why; a GPU that is "
        "full or ill ends the runner. 'hash' and 'null' are test backends without a model.",
        json_schema_extra=EVERYONE,
    )
    dtype: Literal["auto", "bfloat16", "float16"] = Field(
        "auto",
        description="Type that a GPU computes in; auto: the checkpoint's, or bfloat16. A CPU computes in float32.",
        json_schema_extra=EVERYONE,
    )
    weights: CliSuppress[Literal["checkpoint", "random"]] = Field(
        "checkpoint", description="'random' makes weights up on a GPU, for benchmarks; the model's folder needs none."
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Sequences that can run at once; default: 256 on a GPU, 8 elsewhere.",
        json_schema_extra=EVERYONE,
    )
    block_size: int = Field(
        16,
        ge=1,
        le=1024,
        description="Size of a KV block, in tokens.",
        json_schema_extra=tuning("prompts share prefixes that end within blocks, or block tables grow long"),
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="Size of the KV cache, in tokens; default: what fits into a GPU, 16384 elsewhere.",
        json_schema_extra=EVERYONE,
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="Type of the KV cache on a GPU; auto: the type it computes in. fp8_e4m3 takes half the memory, "
        "makes attention faster for decoding rows, the more and longer they are, and a little slower for prompts, and "
        "rounds keys and values to 4 significant bits.",
        json_schema_extra=tuning("the KV cache is what limits how many sequences run"),
    )
    gpu_memory: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that may be used.", json_schema_extra=OPERATORS
    )
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="Most positions computed in one step, in tokens; default: 8192 on a GPU, 512 elsewhere.",
        json_schema_extra=tuning("a step of prompts takes too long, or too much memory"),
    )
    context_length: int | None = Field(
        None,
        ge=2,
        description="Most positions of one sequence, in tokens; default: what the model can.",
        json_schema_extra=EVERYONE,
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads that compute; 0: one per core.",
        json_schema_extra=tuning("the machine computes something else beside"),
    )
    cache_dir: Path = Field(
        default_factory=default_cache_folder,
        description="Folder of converted models; default: roster in the user's cache folder.",
        json_schema_extra=tuning("the user's cache folder is too small, or is not kept"),
    )
    silence_s: float = Field(
        3.0,
        gt=0,
        description="Seconds without a word of the scheduler after which the runner says hello again.",
        json_schema_extra=tuning("the network to the scheduler stalls for longer than this"),
    )
    plan_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds that a plan may take once the scheduler is gone or has given this runner up; then the "
        "process ends with status 3, to be started again.",
        json_schema_extra=tuning("a single step takes longer than this"),
    )
    test_backend: CliSuppress[BackendForTests] = Field(
        BackendForTests(), description="What the test backends do, as a JSON object; for tests."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="How log lines look.", json_schema_extra=OPERATORS
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level logged.", json_schema_extra=OPERATORS
    )

    @model_validator(mode="after")
    def _keys_come_together(self) -> Self:
        if (self.runner_key is None) != (self.scheduler_key is None):
            raise ValueError("runner_key and scheduler_key encrypt the link together: set both, or neither")
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_old_names(cls, values: Any) -> Any:
        for name in OLD_NAMES.intersection(values if isinstance(values, dict) else ()):
            raise ValueError(refusal(name, f"{name} ({PREFIX}{name.upper()})"))
        return values

    @classmethod
    def read(cls, **given: Any) -> Self:
        """See `ServiceSettings`."""
        if (refused := old_flag(given.get("_cli_parse_args"))) is not None:
            raise UnusableSettings(refused)
        return super().read(**given)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """See `ServiceSettings`; old variables too, which are refused."""
        return *super().settings_customise_sources(settings_cls, *sources, **named), OldVariables(settings_cls)
