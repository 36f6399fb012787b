"""Shows the models on this machine as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from roster_client.terminal.text import one_line

if TYPE_CHECKING:
    from runner_svc.catalog.local_models import LocalModel


def models_view(models: Iterable[LocalModel]) -> Table:
    """Returns the table of `roster models`."""
    table = Table(box=None, pad_edge=False)
    for column in ("model", "found in", "architecture"):
        table.add_column(column, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("served", overflow="fold")
    for model in models:
        served = "yes" if model.obstacle is None else f"no: {escape(one_line(model.obstacle))}"
        table.add_row(
            escape(one_line(model.name)),
            model.place,
            escape(one_line(model.architecture)),
            size(model.num_bytes),
            served,
            style="" if model.obstacle is None else "dim",
        )
    return table


def model_as_dict(model: LocalModel) -> dict[str, Any]:
    """Returns what `roster models --json` prints of a model."""
    return {
        "name": model.name,
        "place": model.place,
        "path": str(model.path),
        "bytes": model.num_bytes,
        "architecture": model.architecture,
        "servable": model.obstacle is None,
        "why_not": model.obstacle,
    }


def size(num_bytes: int) -> str:
    """Returns a size in the unit that suits it."""
    for unit, step in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"
