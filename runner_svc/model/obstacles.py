"""Why a model can't be served, by what describes it alone: without its weights, torch or transformers."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel

_RULES = "runner_svc.model.servable"
_GGUF_RULES = "runner_svc.gguf.servable"


def obstacle(folder: Path) -> str | None:
    """Returns why the model in a folder with config.json can't be served; None when it can."""
    rules = _why_not(_RULES)
    if rules is not None:
        return rules(folder)
    try:
        ModelConfig.from_hugging_face(json.loads((folder / "config.json").read_text("utf-8-sig")))
    except (UnsupportedModel, ModelNotFound) as error:
        return str(error)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"config.json can't be read: {error}"
    return None


def obstacle_before_weights(folder: Path) -> str | None:
    """Returns why no decoder can serve a model, so that its weights need not be downloaded; None when one may."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        return f"config.json can't be read: {error}"
    if not isinstance(config, dict) or not (config.get("architectures") or config.get("model_type")):
        return "config.json names neither architectures nor a model_type."
    return None


def gguf_obstacle(file: Path) -> str | None:
    """Returns why a GGUF model can't be served, by the headers of its files; None when it can."""
    rules = _why_not(_GGUF_RULES)
    return rules(file) if rules is not None else None


def _why_not(module: str) -> Callable[[Path], str | None] | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its folder
        return None
    return importlib.import_module(module).why_not if found else None
