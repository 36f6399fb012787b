"""Why a model can't be served, by what describes it alone: without its weights, torch or transformers.

A model that Roster's own decoder lacks may be served through transformers. Whether it is depends on a check at start;
here it is what that check said of a small model of its class.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from runner_svc.model import gguf_servable
from runner_svc.model.checkpoint import servable
from runner_svc.model.decoder_choice import is_only_own, not_by_transformers
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.config_file import read_config

CLASSES_FILE = Path(__file__).with_name("transformers_classes.json")
"""By class of transformers: null if it is served, else why not. `python -m tests.support.classes_page` writes it."""


def obstacle(folder: Path) -> str | None:
    """Returns why the model in a folder with config.json can't be served; None when it can."""
    own = servable.why_not(folder, has_weights=False)
    if own is None:
        return servable.why_not(folder, has_weights=True)
    known, why = _through_transformers(folder, own)
    return (why or None) if known else own


def obstacle_before_weights(folder: Path) -> str | None:
    """Returns why no decoder can serve a model, so that its weights need not be downloaded; None when one may."""
    try:
        config = read_config(folder)
    except (ModelNotFound, UnsupportedModel) as error:
        return str(error)
    if not (config.get("architectures") or config.get("model_type")):
        return "config.json names neither architectures nor a model_type."
    own = servable.why_not(folder, has_weights=False)
    return _through_transformers(folder, own)[1] or None if own is not None else None


def gguf_obstacle(file: Path) -> str | None:
    """Returns why a GGUF model can't be served, by the headers of its files; None when it can."""
    return gguf_servable.why_not(file)


def _through_transformers(folder: Path, own: str) -> tuple[bool, str]:
    """Returns whether it is known what transformers does, and why it can't serve the model; "" if it can.

    `own` is why Roster's own decoder can't: all that counts for a quantized model of its classes.
    """
    try:
        config = read_config(folder)
    except (ModelNotFound, UnsupportedModel) as error:
        return True, str(error)
    if is_only_own(config):
        return True, own
    if (why_not := not_by_transformers(config)) is not None:
        return True, why_not
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in _classes():
            why = _classes()[name]
            return True, f"{name} is not served: {why}" if why else ""
    return False, ""


@cache
def _classes() -> dict[str, str | None]:
    classes: dict[str, str | None] = json.loads(CLASSES_FILE.read_text("utf-8"))
    return classes
