"""Commands that take the settings of both services as options, made from the settings' fields when they are needed.

Other commands then start without importing the settings.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from roster_client.options.policy_names import policy_names

_GIVEN = "roster.settings"

FOR_OTHERS = (
    "listen", "admin_listen", "metrics_listen", "gateway_listen", "link", "tls_cert", "tls_key", "tls_client_ca",
    "tokens", "admin_tokens", "link_key", "link_runners", "runner_key", "scheduler_key", "insecure",
)  # fmt: skip
"""Settings of services that others use: where they listen, and what protects them."""


@dataclass(frozen=True, slots=True)
class BothSettings:
    """The settings that a command line gives, by name; one that both services have is in both."""

    scheduler: dict[str, Any]
    runner: dict[str, Any]

    @classmethod
    def of(cls, context: typer.Context) -> BothSettings:
        """Returns the options of the running command, which is a `SettingsCommand`. Raises UnusableSettings."""
        from roster_common.setting_options import fields_of, given

        scheduler, runner = _classes()
        told = given(fields_of(scheduler, runner), context.meta[_GIVEN])
        return cls(
            {name: value for name, value in told.items() if name in scheduler.model_fields},
            {name: value for name, value in told.items() if name in runner.model_fields},
        )


class SettingsCommand(TyperCommand):
    """A command with the options of its function and those of both services' settings."""

    without: frozenset[str] = frozenset()
    """Settings that are no options of the command."""
    _options: list[Any] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns all options, the function's first."""
        if self._options is None:
            self._options = _options({option.name for option in self.params} | self.without)
        return [*super().get_params(ctx), *self._options]

    def invoke(self, ctx: Any) -> Any:
        """Runs the function, which finds the settings with `BothSettings.of`."""
        ctx.meta[_GIVEN] = {option.name: ctx.params.pop(option.name) for option in self._options or ()}
        return super().invoke(ctx)


class OwnSettingsCommand(SettingsCommand):
    """A command that starts services for itself alone: addresses, TLS and tokens are not for its user to set."""

    without = frozenset(FOR_OTHERS)


def _classes() -> tuple[Any, Any]:
    from runner_svc.settings.runner_settings import RunnerSettings
    from scheduler_svc.settings.scheduler_settings import SchedulerSettings

    return SchedulerSettings, RunnerSettings


def _options(taken: set[str]) -> list[Any]:
    """Returns an option for each field of the services, except for names that the function takes itself."""
    from roster_common.setting_options import fields_of, parameters

    fields = {name: field for name, field in fields_of(*_classes()).items() if name not in taken}

    def command(**options: Any) -> None:
        """Has the signature."""

    command.__signature__ = inspect.Signature(parameters(fields, {"policy": policy_names}))  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(command)
    return list(typer.main.get_command(app).params)
