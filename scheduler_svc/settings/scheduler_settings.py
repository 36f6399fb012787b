"""Settings of the scheduler service: flags, then `ROSTER_*` environment, then the file named by `ROSTER_SETTINGS`.

Every field states its unit; `roster-scheduler --help` prints them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliSuppress, SettingsConfigDict

from roster_common.setting_levels import EVERYONE, OPERATORS, tuning
from roster_common.setting_sources import ServiceSettings
from scheduler_svc.settings.tenant_limits import TenantLimits


class SchedulerSettings(ServiceSettings):
    """What an operator may set on `roster-scheduler`."""

    model_config = SettingsConfigDict(
        env_prefix="ROSTER_", extra="ignore", cli_kebab_case=True, cli_prog_name="roster-scheduler"
    )

    listen: str = Field(
        "127.0.0.1:50061",
        description="Address of the public gRPC API, host:port (port 0: any).",
        json_schema_extra=EVERYONE,
    )
    admin_listen: str = Field(
        "127.0.0.1:50062", description="Address of the admin API; '' turns it off.", json_schema_extra=OPERATORS
    )
    gateway_listen: str = Field(
        "",
        description="Address of the service for OpenAI gateways alone, which bring neither TLS nor tokens: for a "
        "private network; '' serves it at `listen`, behind what that asks for.",
        json_schema_extra=OPERATORS,
    )
    metrics_listen: str = Field(
        "127.0.0.1:50064",
        description="Address of Prometheus metrics, http://host:port/metrics; '' turns them off.",
        json_schema_extra=OPERATORS,
    )
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="OpenTelemetry collector that gets a trace of each request over OTLP gRPC, "
        "http(s)://host:4317; '' turns tracing off.",
        json_schema_extra=OPERATORS,
    )
    link: str = Field(
        "tcp://127.0.0.1:50063", description="ZeroMQ endpoint that runners connect to.", json_schema_extra=EVERYONE
    )
    tls_cert: Path | None = Field(
        None, description="Certificate chain of both gRPC APIs, PEM; turns TLS on.", json_schema_extra=EVERYONE
    )
    tls_key: Path | None = Field(None, description="Private key of that certificate, PEM.", json_schema_extra=EVERYONE)
    tls_client_ca: Path | None = Field(
        None,
        description="Authorities that sign client certificates, PEM; without one of theirs nobody gets in.",
        json_schema_extra=OPERATORS,
    )
    tokens: Path | None = Field(
        None,
        description="File of bearer tokens for the public API, lines of `TENANT TOKEN`; it says whose a call is.",
        json_schema_extra=EVERYONE,
    )
    admin_tokens: Path | None = Field(
        None, description="File of bearer tokens for the admin API, lines of `NAME TOKEN`.", json_schema_extra=OPERATORS
    )
    link_key: Path | None = Field(
        None,
        description="File with this service's secret CURVE key (`roster keygen`); encrypts the link to runners.",
        json_schema_extra=OPERATORS,
    )
    link_runners: Path | None = Field(
        None,
        description="File with the public CURVE keys of the runners that may connect, one a line.",
        json_schema_extra=OPERATORS,
    )
    insecure: bool = Field(
        False,
        description="Listen beyond loopback without TLS, tokens or CURVE: for networks that are private by themselves.",
        json_schema_extra=OPERATORS,
    )
    front_workers: int = Field(
        1,
        ge=0,
        le=64,
        description="Front worker processes; 0 serves gRPC from the engine's own process.",
        json_schema_extra=OPERATORS,
    )
    policy: str = Field(
        "fcfs", description="Scheduling policy, an entry point of group roster.policies.", json_schema_extra=EVERYONE
    )
    policy_parameters: dict[str, Any] = Field(
        default_factory=dict, description="The policy's parameters, as JSON.", json_schema_extra=EVERYONE
    )
    policy_timeout_ms: float = Field(
        100.0,
        ge=0,
        description="A call of the policy that takes longer is reported and interrupted; 0: never.",
        json_schema_extra=tuning("a policy of your own may take long, or must never be interrupted in a debugger"),
    )
    depth: int = Field(
        2,
        ge=1,
        le=3,
        description="Plans in flight per runner.",
        json_schema_extra=tuning(
            "steps are so long that a plan less in flight shortens the wait of requests that come"
        ),
    )
    plan_lead_ms: float | None = Field(
        None,
        ge=0,
        description="Milliseconds before a runner runs dry at which its next plan is made, so that who comes meanwhile "
        "still gets into it; default: as soon as the depth allows.",
        json_schema_extra=tuning("requests that come one by one should get into the next step"),
    )
    busy_poll_us: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Microseconds for which the engine looks for results without sleeping while a runner computes: "
        "takes up to a core, saves a wake-up a step.",
        json_schema_extra=tuning("a core is free and steps are short: it saves a wake-up a step"),
    )
    mask_threads: int = Field(
        4,
        ge=1,
        le=64,
        description="Threads of the process that makes the masks of constrained sequences, while the runner computes.",
        json_schema_extra=tuning("many constrained sequences run, and `roster top` shows steps that wait for masks"),
    )
    prefix_sharing: bool = Field(
        True,
        description="Sequences share the KV blocks of equal prefixes.",
        json_schema_extra=tuning("no prompts share a prefix, or a measurement must not"),
    )
    isolate_tenants: bool = Field(
        False, description="Prefixes are shared only between requests of one tenant.", json_schema_extra=OPERATORS
    )
    max_waiting_requests: int = Field(
        8192, ge=1, description="Requests that may wait; more are refused.", json_schema_extra=OPERATORS
    )
    max_waiting_tokens: int = Field(
        16_000_000,
        ge=1,
        description="Prompt tokens that may wait; more are refused.",
        json_schema_extra=tuning("memory for waiting prompts is short, or prompts are very long"),
    )
    tenant_limits: dict[str, TenantLimits] = Field(
        default_factory=dict,
        description='Limits by tenant, "*" for those not named, as JSON: {"*": {"waiting": 256, "tokens": 1000000, '
        '"running": 64, "weight": 1}}, each optional; weight is the part of a full queue.',
        json_schema_extra=OPERATORS,
    )
    early_refusal: bool = Field(
        True,
        description="Refuse at once what can't meet its deadline at the present load.",
        json_schema_extra=OPERATORS,
    )
    runner_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds without a message after which a runner is dead.",
        json_schema_extra=tuning("the network to runners stalls for longer than this"),
    )
    plan_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Age in seconds at which the oldest plan proves that its runner hangs.",
        json_schema_extra=tuning("a single step takes longer than this, on a slow CPU for one"),
    )
    no_runner_s: float = Field(
        60.0,
        gt=0,
        description="Seconds without a runner, or without one that can hold the sequence, after which a stream ends "
        "UNAVAILABLE.",
        json_schema_extra=OPERATORS,
    )
    retention_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that a finished request stays attachable.",
        json_schema_extra=tuning("clients attach again later than this"),
    )
    retention_requests: int = Field(
        4096,
        ge=0,
        description="Finished requests kept attachable, at most.",
        json_schema_extra=tuning("more requests than this end within `retention_s` and their clients attach again"),
    )
    attach_s: float = Field(
        10.0,
        ge=0,
        description="Least seconds that a client has to attach again after the scheduler or a worker restarted.",
        json_schema_extra=tuning("clients need longer to come back"),
    )
    flush_ms: float = Field(
        30.0,
        ge=0,
        le=1000,
        description="Longest time that deltas wait to be merged under load, in milliseconds.",
        json_schema_extra=tuning("tokens come in larger pieces than clients want, or front workers are the bottleneck"),
    )
    stall_s: float = Field(
        10.0,
        gt=0,
        description="Seconds without a turn of the engine, or without a plan's result, after which it hangs.",
        json_schema_extra=tuning("liveness probes restart a service whose steps are just slow"),
    )
    drain_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get on SIGTERM.", json_schema_extra=OPERATORS
    )
    keepalive_s: float = Field(
        30.0,
        ge=1,
        description="Seconds until a silent client is asked for a sign of life, and then as many to give it.",
        json_schema_extra=tuning("a proxy between closes silent connections earlier"),
    )
    max_calls: int = Field(
        16384,
        ge=1,
        description="gRPC calls that one front worker has open, streams included; more are refused.",
        json_schema_extra=tuning("clients use more calls than this at once, instead of sessions"),
    )
    max_message_bytes: int = Field(
        16 << 20,
        ge=1024,
        description="Largest gRPC request, in bytes.",
        json_schema_extra=tuning("prompts are larger than this"),
    )
    check: CliSuppress[bool] = Field(
        False, description="Prove the pool's and roster's invariants after every step (slow; tests)."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="How log lines look.", json_schema_extra=OPERATORS
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level logged.", json_schema_extra=OPERATORS
    )

    @model_validator(mode="after")
    def _files_come_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca asks clients for certificates: set tls_cert and tls_key too")
        if (self.link_key is None) != (self.link_runners is None):
            raise ValueError("link_key and link_runners encrypt the link together: set both, or neither")
        return self
