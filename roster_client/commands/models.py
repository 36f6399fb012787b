"""`roster models`: the models on this machine, and which of them can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from roster_client.terminal.models_view import model_as_dict, models_view

if TYPE_CHECKING:
    from runner_svc.catalog.local_models import LocalModel


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of models, or .gguf files, to list besides the caches.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Folder of converted models, as the runner's setting.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the models as JSON.")] = False,
) -> None:
    """List the models on this machine: which can be served, and why the others can't."""
    found, notes = _found(folders or [], cache_dir)
    if as_json:
        typer.echo(json.dumps([model_as_dict(model) for model in found], indent=2))
    elif found:
        Console().print(models_view(found))
    else:
        typer.echo("There are no models here. `roster serve --model organisation/model` downloads one.")
    for note in notes:
        typer.echo(note, err=True)


def _found(folders: list[Path], cache_dir: Path | None) -> tuple[list[LocalModel], list[str]]:
    """Returns the models, and what is wrong with a cache."""
    try:
        from runner_svc.catalog.local_models import converted_models, folder_models, hub_models, packaged_models
        from runner_svc.hub.cache import hub_cache_folder
        from runner_svc.hub.names import HubError
        from runner_svc.settings.runner_settings import RunnerSettings
    except ImportError as error:
        raise ValueError(f"models needs the runner: pip install 'roster-serve[runner]' ({error})") from error

    notes: list[str] = []
    found = list(packaged_models())
    try:
        found += hub_models(hub_cache_folder())
    except (HubError, OSError) as error:
        notes.append(str(error))
    found += converted_models(cache_dir or RunnerSettings.read().cache_dir)
    for folder in folders:
        found += folder_models(folder)
    return found, notes
