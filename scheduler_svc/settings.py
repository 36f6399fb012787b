"""Settings of the scheduler service: flags, then `ROSTER_*` environment, then the file named by `ROSTER_SETTINGS`.

Every field states its unit; `roster-scheduler --help` prints them all.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)


class SchedulerSettings(BaseSettings):
    """What an operator may set on `roster-scheduler`."""

    model_config = SettingsConfigDict(
        env_prefix="ROSTER_", extra="ignore", cli_kebab_case=True, cli_prog_name="roster-scheduler"
    )

    listen: str = Field("127.0.0.1:50061", description="Address of the public gRPC API, host:port (port 0: any).")
    admin_listen: str = Field("127.0.0.1:50062", description="Address of the admin API; '' turns it off.")
    link: str = Field("tcp://127.0.0.1:50063", description="ZeroMQ endpoint that runners connect to.")
    front_workers: int = Field(
        1, ge=0, le=64, description="Front worker processes; 0 serves gRPC from the engine's own process."
    )
    policy: str = Field("fcfs", description="Scheduling policy, an entry point of group roster.policies.")
    policy_parameters: dict[str, Any] = Field(default_factory=dict, description="The policy's parameters, as JSON.")
    depth: int = Field(2, ge=1, le=3, description="Plans in flight per runner.")
    prefix_sharing: bool = Field(True, description="Sequences share the KV blocks of equal prefixes.")
    isolate_tenants: bool = Field(False, description="Prefixes are shared only between requests of one tenant.")
    max_waiting_requests: int = Field(8192, ge=1, description="Requests that may wait; more are refused.")
    max_waiting_tokens: int = Field(16_000_000, ge=1, description="Prompt tokens that may wait; more are refused.")
    runner_timeout_s: float = Field(10.0, gt=0, description="Seconds without a message after which a runner is dead.")
    plan_timeout_s: float = Field(
        120.0, gt=0, description="Age in seconds at which the oldest plan proves that its runner hangs."
    )
    no_runner_s: float = Field(60.0, gt=0, description="Seconds without a runner after which streams end UNAVAILABLE.")
    retention_s: float = Field(60.0, ge=0, description="Seconds that a finished request stays attachable.")
    retention_requests: int = Field(4096, ge=0, description="Finished requests kept attachable, at most.")
    flush_ms: float = Field(
        30.0, ge=0, le=1000, description="Longest time that deltas wait to be merged under load, in milliseconds."
    )
    drain_s: float = Field(30.0, ge=0, description="Seconds that running requests get on SIGTERM.")
    max_message_bytes: int = Field(16 << 20, ge=1024, description="Largest gRPC request, in bytes.")
    check: bool = Field(False, description="Prove the pool's and roster's invariants after every step (slow; tests).")
    log_format: Literal["console", "json"] = Field("console", description="How log lines look.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and arguments win over the environment, which wins over the file."""
        file = JsonConfigSettingsSource(settings_cls, json_file=os.environ.get("ROSTER_SETTINGS"))
        return init_settings, env_settings, file
