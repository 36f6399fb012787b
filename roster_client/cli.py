"""The `roster` command: generates and chats against a server, inspects it, or runs both services.

A failure prints one red sentence on stderr and sets the exit status (`exit_codes.py`).
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from roster_client.client.errors import RosterError, UnavailableError
from roster_client.commands.ask import chat, generate
from roster_client.commands.batch import batch
from roster_client.commands.bench import bench_app
from roster_client.commands.calibrate import calibrate
from roster_client.commands.doctor import doctor
from roster_client.commands.models import models
from roster_client.commands.operator import drain, keygen
from roster_client.commands.policy import policy_app
from roster_client.commands.services import demo, serve
from roster_client.commands.simulate import simulate
from roster_client.commands.status import health, status
from roster_client.commands.timeline import timeline
from roster_client.commands.top import top
from roster_client.commands.verify import verify
from roster_client.options.connection import connection_options
from roster_client.options.from_settings import OwnSettingsCommand, SettingsCommand
from roster_client.terminal.exit_codes import EXPLANATION, ExitCode, exit_code_for
from roster_common.std_streams import OutputLost, guard_output
from roster_common.unknown_settings import UNKNOWN, refused_variable, unknown_variables
from roster_common.usage_errors import sentence

errors = Console(stderr=True)


class RosterGroup(TyperGroup):
    """Turns exceptions that the user can act on into a sentence and an exit status."""

    def main(self, args: Any = None, prog_name: str | None = None, **more: Any) -> Any:  # type: ignore[override]
        """Runs the command line; one that can't be understood is a sentence too."""
        if not more.pop("standalone_mode", True):
            return super().main(args, prog_name, standalone_mode=False, **more)
        try:
            status = super().main(args, prog_name, standalone_mode=False, **more)
        except typer.TyperException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(error.format_message(), err=True)
            else:
                _print(sentence(error, "roster"))
            status = error.exit_code
        except typer.Abort:
            status = ExitCode.FAILED
        sys.exit(status or ExitCode.OK)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command and reports its errors, and variables that are not settings."""
        _check_variables()
        try:
            return super().invoke(ctx)
        except RosterError as error:
            fail(_sentence(error), exit_code_for(error))
        except (ValueError, TypeError) as error:
            fail(str(error), ExitCode.USAGE)
        except BrokenPipeError:  # `roster ... | head`, which typer ends in silence
            raise
        except OSError as error:  # a file that can't be read or written
            nameless = "an output file: " if error.errno == errno.ENOSPC else ""
            where = f"{error.filename}: " if error.filename is not None else nameless
            fail(f"{where}{error.strerror or error}", ExitCode.FAILED)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    cls=RosterGroup,
    no_args_is_help=True,
    help="Serve language models with continuous batching, and send requests to a server.",
    epilog=EXPLANATION,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.callback()(connection_options)
for command in (
    drain,
    keygen,
    generate,
    verify,
    chat,
    batch,
    status,
    health,
    serve,
    models,
    doctor,
    demo,
    simulate,
    calibrate,
):
    cls = {serve: SettingsCommand, doctor: SettingsCommand, batch: OwnSettingsCommand}.get(command)
    app.command(cls=cls)(command)
for command in (timeline, top):
    app.command()(command)
app.add_typer(policy_app, name="policy")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of `roster`."""
    guard_output()
    try:
        try:
            app(prog_name="roster")
        finally:
            sys.stdout.flush()
    except OutputLost as lost:
        _print(str(lost))
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def _check_variables() -> None:
    """Refuses a misspelled `ROSTER_*` variable; warns once of others that nothing reads, also for child processes."""
    if refused := refused_variable(os.environ):
        fail(refused, ExitCode.USAGE)
    if unknown := unknown_variables(os.environ):
        errors.print(f"[yellow]{', '.join(unknown)}: {UNKNOWN}[/]", highlight=False, soft_wrap=True)
        for variable in unknown:
            del os.environ[variable]


def fail(message: str, code: ExitCode) -> None:
    """Prints one red sentence and exits with `code`."""
    _print(message)
    raise typer.Exit(code)


def _print(message: str) -> None:
    errors.print(f"[red]{escape(message)}[/]", highlight=False, soft_wrap=True)


def _sentence(error: RosterError) -> str:
    if isinstance(error, UnavailableError) and error.retry_after_s is None:  # else a server has answered
        other = "at this address" in str(error)
        hint = "Check the address, and the options of TLS." if other else "Is `roster serve` running?"
        return f"The server is not available: {error}. {hint}"
    return str(error)


if __name__ == "__main__":
    main()
