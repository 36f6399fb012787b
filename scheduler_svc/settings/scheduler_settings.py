"""Settings of the scheduler service, from flags, `ROSTER_*` variables and the file that `ROSTER_SETTINGS` names.

The first source that sets a field wins. `roster-scheduler --help` prints every field with its unit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from roster_common.endpoints import check_link, check_listen
from roster_common.profile_names import ProfileName
from roster_common.setting_levels import EVERYONE, OPERATORS, tuning
from roster_common.setting_sources import ServiceSettings
from scheduler_svc.settings.profiles import PROFILES, Profile
from scheduler_svc.settings.tenant_limits import TenantLimits


class SchedulerSettings(ServiceSettings):
    """Settings of `roster-scheduler`."""

    model_config = SettingsConfigDict(env_prefix="ROSTER_", extra="ignore")

    listen: str = Field(
        "127.0.0.1:50061",
        description="Address of the public gRPC API, host:port; port 0 selects a free one.",
        json_schema_extra=EVERYONE,
    )
    admin_listen: str = Field(
        "127.0.0.1:50062",
        description="Address of the admin gRPC API, host:port; '' disables it.",
        json_schema_extra=OPERATORS,
    )
    gateway_listen: str = Field(
        "",
        description="Separate address of the service for OpenAI gateways, host:port, without TLS and tokens, which "
        "gateways do not support; for private networks only. '' serves it at `listen`, with the TLS and tokens set "
        "there.",
        json_schema_extra=OPERATORS,
    )
    metrics_listen: str = Field(
        "127.0.0.1:50064",
        description="Address of Prometheus metrics, host:port, served at http://host:port/metrics; '' disables them.",
        json_schema_extra=OPERATORS,
    )
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="OpenTelemetry collector that receives a trace of each request over OTLP gRPC, "
        "http(s)://host:4317; '' disables tracing.",
        json_schema_extra=OPERATORS,
    )
    link: str = Field(
        "tcp://127.0.0.1:50063", description="ZeroMQ endpoint to which runners connect.", json_schema_extra=EVERYONE
    )
    tls_cert: Path | None = Field(
        None,
        description="File with the certificate chain of both gRPC APIs, PEM; enables TLS.",
        json_schema_extra=EVERYONE,
    )
    tls_key: Path | None = Field(
        None, description="File with the private key of `tls_cert`, PEM.", json_schema_extra=EVERYONE
    )
    tls_client_ca: Path | None = Field(
        None,
        description="File with the authorities that sign client certificates, PEM; clients without a certificate from "
        "one of them are rejected.",
        json_schema_extra=OPERATORS,
    )
    tokens: Path | None = Field(
        None,
        description="File with bearer tokens of the public API, one `TENANT TOKEN` per line; the token determines the "
        "tenant of a call.",
        json_schema_extra=EVERYONE,
    )
    admin_tokens: Path | None = Field(
        None,
        description="File with bearer tokens of the admin API, one `NAME TOKEN` per line.",
        json_schema_extra=OPERATORS,
    )
    link_key: Path | None = Field(
        None,
        description="File with this service's secret CURVE key (`roster keygen`); encrypts the link to runners. "
        "Requires `link_runners`.",
        json_schema_extra=OPERATORS,
    )
    link_runners: Path | None = Field(
        None,
        description="File with the public CURVE keys of the runners that may connect, one per line.",
        json_schema_extra=OPERATORS,
    )
    insecure: bool = Field(
        False,
        description="Allow listening beyond loopback without TLS, tokens or CURVE; for private networks only.",
        json_schema_extra=OPERATORS,
    )
    front_workers: int = Field(
        1,
        ge=0,
        le=64,
        description="Front worker processes, which serve gRPC; 0 serves it in the engine's process.",
        json_schema_extra=OPERATORS,
    )
    policy: str = Field(
        "auto",
        description="Scheduling policy: an entry point of the group roster.policies, a file (./mine.py), or "
        "module:Class.",
        json_schema_extra=EVERYONE,
    )
    policy_dir: Path | None = Field(
        None,
        description="Folder with policies as files, which `roster policy set mine.py` can put in force. The code in it "
        "runs in the scheduler, so only its operator may write there.",
        json_schema_extra=tuning("you write policies, and try them while requests run"),
    )
    policy_parameters: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the policy, as JSON.", json_schema_extra=EVERYONE
    )
    retention: str = Field(
        "lru",
        description="What the prefix cache keeps: `lru`, the blocks used last; `session`, the contexts of "
        "conversations that are likely to come back; or a policy with a `retain` of its own, a file or module:Class.",
        json_schema_extra=tuning("contexts of conversations are evicted between their turns"),
    )
    retention_parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters of the retention, as JSON.",
        json_schema_extra=tuning("you set `retention`"),
    )
    hint_longest_s: float = Field(
        3600.0,
        ge=0,
        description="Longest kv_retain_s and next_turn_s of a request that counts, in seconds; longer ones are cut.",
        json_schema_extra=tuning("clients ask to keep contexts that never come back"),
    )
    hint_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of a runner's KV cache that a tenant's cached blocks may take for its hints to count, while "
        "other tenants have cached blocks too.",
        json_schema_extra=tuning("some tenants need more of the cache than others"),
    )
    itl_target_ms: float | None = Field(
        None,
        ge=0,
        description="Target of the policy `auto` for the 99th percentile of the time between tokens, in milliseconds; "
        "0: no target, throughput alone counts. Default: 8 decode steps of one row, 5 to 35 ms on a GPU.",
        json_schema_extra=EVERYONE,
    )
    policy_timeout_ms: float = Field(
        100.0,
        ge=0,
        description="Milliseconds after which a call of the policy is logged and interrupted; 0: never.",
        json_schema_extra=tuning("your own policy is slow, or you debug it"),
    )
    profile: ProfileName = Field(
        "balanced",
        description="What the service is tuned for: sets depth, plan_lead_ms, busy_poll_us and flush_ms where they are "
        "not given, and adapts them to the load. latency: the shortest waits, at some cost in CPU; quiet: the least "
        "CPU.",
        json_schema_extra=EVERYONE,
    )
    depth: int | None = Field(
        None,
        ge=1,
        le=3,
        description="Maximum number of plans in flight per runner. Default, by `profile`: 2, or 3 where a plan takes "
        "longer to reach its runner than a step takes.",
        json_schema_extra=tuning("steps are long: fewer plans in flight shorten the wait of new requests"),
    )
    plan_lead_ms: float | None = Field(
        None,
        ge=0,
        description="Milliseconds before a runner completes its plans in flight at which its next plan is made; "
        "requests that arrive before then still get into it. Longer than a step: as soon as `depth` allows. "
        "Default: by `profile`, as measured on each runner.",
        json_schema_extra=tuning('`roster_late_plans_total` rises with `roster_runner_seconds_total{state="idle"}`'),
    )
    busy_poll_us: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="Microseconds for which the engine polls for results before it sleeps, while a runner computes; "
        "0: it never polls. Default: by `profile`, near the predicted time of a result if a core is free.",
        json_schema_extra=tuning("the engine should use more or less of a core than `roster_poll_seconds_total` shows"),
    )
    mask_threads: int = Field(
        4,
        ge=1,
        le=64,
        description="Threads of the process that computes the masks of constrained sequences.",
        json_schema_extra=tuning("many constrained sequences run, and `roster top` shows steps that wait for masks"),
    )
    forced_tokens: bool = Field(
        True,
        description="Compute the tokens that a grammar forces together, instead of in a step each.",
        json_schema_extra=tuning("you measure without them"),
    )
    prefix_sharing: bool = Field(
        True,
        description="Share the KV blocks of equal prefixes between sequences.",
        json_schema_extra=tuning("no prompts share a prefix, or you measure without sharing"),
    )
    isolate_tenants: bool = Field(
        False, description="Share prefixes only between requests of one tenant.", json_schema_extra=OPERATORS
    )
    max_waiting_requests: int = Field(
        8192,
        ge=1,
        description="Maximum number of waiting requests; further ones are refused.",
        json_schema_extra=OPERATORS,
    )
    max_waiting_tokens: int = Field(
        16_000_000,
        ge=1,
        description="Maximum number of waiting prompt tokens; requests beyond them are refused.",
        json_schema_extra=tuning("memory for waiting prompts is short, or prompts are very long"),
    )
    tenant_limits: dict[str, TenantLimits] = Field(
        default_factory=dict,
        description='Limits by tenant, "*" for tenants not named, as JSON: {"*": {"waiting": 256, "tokens": 1000000, '
        '"running": 64, "weight": 1}}. Each is optional: waiting sequences, waiting prompt tokens, running sequences, '
        "and the relative share of a full queue.",
        json_schema_extra=OPERATORS,
    )
    early_refusal: bool = Field(
        True,
        description="Refuse a request at once if it cannot meet its deadline at the current load.",
        json_schema_extra=OPERATORS,
    )
    runner_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds without a message after which a runner is considered lost.",
        json_schema_extra=tuning("the network to runners stalls for longer than this"),
    )
    plan_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Age of the oldest plan in flight, in seconds, at which its runner is considered hung.",
        json_schema_extra=tuning("a single step takes longer than this, for example on a slow CPU"),
    )
    no_runner_s: float = Field(
        60.0,
        gt=0,
        description="Seconds without a runner, or without one that can hold the sequence, after which a stream ends "
        "with UNAVAILABLE.",
        json_schema_extra=OPERATORS,
    )
    retention_s: float = Field(
        60.0,
        ge=0,
        description="Seconds for which a client can attach to a finished request.",
        json_schema_extra=tuning("clients reattach later than this"),
    )
    retention_requests: int = Field(
        4096,
        ge=0,
        description="Maximum number of finished requests to which clients can attach.",
        json_schema_extra=tuning("more requests than this end within `retention_s` and their clients reattach"),
    )
    attach_s: float = Field(
        10.0,
        ge=0,
        description="Least time that a client has to reattach after a restart of the scheduler or a front worker, in "
        "seconds.",
        json_schema_extra=tuning("clients need longer to reconnect"),
    )
    flush_ms: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="Longest time for which deltas are held to be merged above 5,000 messages per second, in "
        "milliseconds. Default: by `profile`, at most 30, and only where a front worker is overloaded.",
        json_schema_extra=tuning("tokens arrive in larger pieces than clients want, or front workers are overloaded"),
    )
    stall_s: float = Field(
        10.0,
        gt=0,
        description="Seconds without an iteration of the engine's loop, or without a plan's result, after which the "
        "health check of the engine or of its runners fails.",
        json_schema_extra=tuning("liveness probes restart a service whose steps are merely slow"),
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that running requests have to finish after SIGTERM.",
        json_schema_extra=OPERATORS,
    )
    keepalive_s: float = Field(
        30.0,
        ge=1,
        description="Seconds without traffic after which a client's connection is pinged; a ping unanswered for the "
        "same time closes it.",
        json_schema_extra=tuning("a proxy in between closes idle connections earlier"),
    )
    max_calls: int = Field(
        16384,
        ge=1,
        description="Maximum number of open gRPC calls per front worker, streams included; further ones are refused.",
        json_schema_extra=tuning("clients use more calls than this at once, instead of sessions"),
    )
    max_message_bytes: int = Field(
        16 << 20,
        ge=1024,
        description="Largest gRPC request, in bytes.",
        json_schema_extra=tuning("prompts are larger than this"),
    )
    check: bool = Field(
        False, description="Check the invariants of scheduler and block pool after every step (slow; for tests)."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="Format of log lines.", json_schema_extra=OPERATORS
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged.", json_schema_extra=OPERATORS
    )

    @property
    def tuned(self) -> Profile:
        """What `profile` sets, before settings that are given override it."""
        return PROFILES[self.profile]

    _addresses = field_validator("listen", "admin_listen", "gateway_listen", "metrics_listen")(check_listen)
    _link = field_validator("link")(check_link)

    @model_validator(mode="after")
    def _files_come_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca requires TLS: set tls_cert and tls_key too")
        if (self.link_key is None) != (self.link_runners is None):
            raise ValueError("link_key and link_runners belong together: set both, or neither")
        return self
