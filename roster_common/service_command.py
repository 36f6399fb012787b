"""The command line of a service: options from its settings (see setting_options), `--version` and `--help`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from roster_common.setting_options import given, parameters
from roster_common.setting_sources import ServiceSettings, UnusableSettings
from roster_common.usage_errors import sentence

Settings = TypeVar("Settings", bound=ServiceSettings)

_EPILOG = (
    "An option overrides its variable, ROSTER_ and the option's name in capitals (ROSTER_LOG_LEVEL), which overrides "
    "the JSON file named by ROSTER_SETTINGS. docs/settings.md says when to change which."
)


def read_command_line(
    settings: type[Settings],
    program: str,
    about: str,
    version: Callable[[], str],
    arguments: Sequence[str] | None = None,
) -> Settings:
    """Returns the settings that a command line, the environment and the file give. Raises UnusableSettings.

    `arguments`: by default this process's. `about`: what the service does, for `--help`. `version`: what `--version`
    prints. Raises SystemExit after `--help` and `--version`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:  # as in a container: no options need to be made
        return settings.read()
    settings.refuse_flags(arguments)
    fields = settings.model_fields

    def command(version: bool, **options: Any) -> dict[str, Any]:
        return given(fields, options)

    def print_version(asked: bool) -> None:
        if asked:
            typer.echo(version())
            raise typer.Exit

    option = typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    asked = inspect.Parameter(
        "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )
    command.__signature__ = inspect.Signature([*parameters(fields), asked])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(help=about, epilog=_EPILOG)(command)
    try:
        told = app(list(arguments), prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        raise UnusableSettings(sentence(error, program)) from error
    if not isinstance(told, dict):
        sys.exit(told)
    return settings.read(**told)
