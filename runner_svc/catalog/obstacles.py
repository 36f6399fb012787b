"""Why a model can't be served, by what describes it alone: without its weights, torch or transformers.

A model that Roster's own decoder lacks may be served through transformers. Whether it is depends on a check at start;
here it is what that check said of a small model of its class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from runner_svc.model import gguf_servable
from runner_svc.model.checkpoint import servable

CLASSES_FILE = Path(__file__).with_name("transformers_classes.json")
"""By class of transformers: null if it is served, else why not. `python -m tests.support.classes_page` writes it."""


def obstacle(folder: Path) -> str | None:
    """Returns why the model in a folder with config.json can't be served; None when it can."""
    own = servable.why_not(folder, has_weights=False)
    if own is None:
        return servable.why_not(folder, has_weights=True)
    known, why = _through_transformers(folder)
    return (why or None) if known else own


def obstacle_before_weights(folder: Path) -> str | None:
    """Returns why no decoder can serve a model, so that its weights need not be downloaded; None when one may."""
    try:
        config = _config(folder)
    except (OSError, ValueError) as error:
        return f"config.json can't be read: {error}."
    if not (config.get("architectures") or config.get("model_type")):
        return "config.json names neither architectures nor a model_type."
    if servable.why_not(folder, has_weights=False) is None:
        return None
    return _through_transformers(folder)[1] or None


def gguf_obstacle(file: Path) -> str | None:
    """Returns why a GGUF model can't be served, by the headers of its files; None when it can."""
    return gguf_servable.why_not(file)


def _through_transformers(folder: Path) -> tuple[bool, str]:
    """Returns whether it is known what transformers does, and why it can't serve the model; "" if it can."""
    try:
        config = _config(folder)
    except (OSError, ValueError) as error:
        return True, f"config.json can't be read: {error}."
    if config.get("auto_map"):
        return True, "Its config.json has an 'auto_map': the model is code of its own, which is never run."
    if config.get("quantization_config"):
        return True, "It is quantized; use a checkpoint in float32, float16 or bfloat16, or a GGUF file."
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in _classes():
            why = _classes()[name]
            return True, f"{name} is not served: {why}" if why else ""
    return False, ""


def _config(folder: Path) -> Mapping[str, Any]:
    """Reads config.json. Raises OSError or ValueError."""
    config = json.loads((folder / "config.json").read_text("utf-8-sig"))
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config


@cache
def _classes() -> dict[str, str | None]:
    classes: dict[str, str | None] = json.loads(CLASSES_FILE.read_text("utf-8"))
    return classes
